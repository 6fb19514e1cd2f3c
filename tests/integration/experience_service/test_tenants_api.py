"""Quotas through REST, the command line and tokens of tenants, with a real gateway."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, STDOUT
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from paceline.config.quota import Quota
from paceline.errors import (
    ConfigError,
    InvalidError,
    LimitError,
    PermissionDeniedError,
    QuotaError,
)
from paceline.front.api.documents import CodeView, TenantView
from paceline.front.api.tenants import quota_from, tenant_from
from paceline.front.client import calls
from paceline.front.client.calls import RestCall
from paceline.front.client.client import AsyncClient
from paceline.platform.digest import digest_of
from paceline.platform.transport.rpc import connect
from paceline.v1 import tenants_pb2 as pb
from paceline.v1.tenants_pb2_grpc import TenantsStub
from paceline_harness.models.folders import write_empty_model
from paceline_harness.patience import call

if TYPE_CHECKING:
    from paceline.v1.tenants_pb2_grpc import TenantsAsyncStub
    from paceline_harness.experience_service.clients import Client

JSON = {"content-type": "application/json"}
BELOW_ZERO = '{"jobs": -1}'
ADMIN = "pl_bootstrap_of_these_tests"


async def test_admins_set_quotas_and_tenants_see_their_own(url: str, client: Client) -> None:
    async with AsyncClient(url, token=ADMIN) as admin:
        made = await admin.set_quota("a", quota=Quota(submitted=1, weight=2.0))
        assert (made.is_custom, made.quota) == (True, Quota(submitted=1, weight=2.0))
        await admin.set_quota("b", quota=Quota(jobs=1))
        await client.submit(tenant="a")
        found = await admin.list_tenants()
        assert [(each.name, each.usage.submitted) for each in found.tenants] == [("a", 1), ("b", 0)]
        with pytest.raises(InvalidError, match="jobs"):
            await admin.send(RestCall("PUT", "/v1/tenants/a/quota", TenantView, body=BELOW_ZERO))
        tokens = {
            role: (await admin.create_token(role, role=role, tenant="a")).secret
            for role in ("read", "submit", "admin")
        }
        log = await admin.list_audit(action="quota.set")
        assert [each.target for each in log.entries] == ["b", "a"]
    for token in tokens.values():
        async with AsyncClient(url, token=token) as mine:
            assert [each.name for each in (await mine.list_tenants()).tenants] == ["a"]
            assert not (await mine.list_tenants(tenant="b")).tenants
            for quota in (Quota(submitted=9), None):
                with pytest.raises(PermissionDeniedError):
                    await mine.set_quota("a", quota=quota)
    with pytest.raises(QuotaError, match="quota submitted"):
        await client.submit(tenant="a")


async def test_what_is_not_named_is_no_limit(url: str, grpc: str) -> None:
    """REST and gRPC agree; sizes and weights default to the installation's."""
    async with AsyncClient(url, token=ADMIN) as admin, connect(grpc, token=ADMIN) as channel:
        stub: TenantsAsyncStub = TenantsStub(channel)
        for body, quota in (
            ('{"jobs": 4}', pb.Quota(jobs=4)),
            ('{"submitted": null, "task_bytes": 7}', pb.Quota(task_bytes=7)),
            ('{"weight": 2, "stored_bytes": 0}', pb.Quota(weight=2, stored_bytes=0)),
            ("{}", pb.Quota()),
        ):
            path = "/v1/tenants/a/quota"
            made = await admin.send(RestCall("PUT", path, TenantView, headers=JSON, body=body))
            named = {"submitted": None, "stored_bytes": None} | json.loads(body)
            assert made.quota == Quota(**named)
            same = await call(stub.SetQuota, pb.SetQuotaRequest(tenant="a", quota=quota))
            assert tenant_from(same).quota == made.quota


def test_sizes_that_are_not_named_are_those_of_the_installation() -> None:
    default = Quota(task_bytes=7, weight=2.0, jobs=3)
    assert quota_from(pb.Quota(spec_bytes=9), default) == Quota(
        submitted=None, stored_bytes=None, spec_bytes=9, task_bytes=7, weight=2.0
    )


def job_with_code(folder: Path, kind: str = "scoring:score") -> Path:
    """A job file beside its code."""
    (folder / "task").mkdir(parents=True)
    write_empty_model(folder)
    (folder / "task" / "scoring.py").write_text("def score(item): return 1.0\n")
    job = {
        "name": "own",
        "model": {"path": str(folder)},
        "code": {"path": "task"},
        "tasks": {"environment": "arithmetic"},
        "reward": [{"kind": kind}],
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def archive_of(data: bytes) -> calls.Archive:
    return calls.Archive(BytesIO(data), digest_of(data), len(data))


async def test_code_goes_up_with_a_job(url: str, tmp_path: Path) -> None:
    async with AsyncClient(url, token=ADMIN) as admin:
        token = (await admin.create_token("a", role="submit", tenant="a")).secret
        reader = (await admin.create_token("r", role="read", tenant="a")).secret
    job = job_with_code(tmp_path / "good")
    async with AsyncClient(url, token=token) as mine:
        made = await mine.submit(job)
        assert made.spec["code"] == {"path": "task", "digest": made.spec["code"]["digest"]}
        misspelt = job_with_code(tmp_path / "misspelt", "scorring:score")
        text = r"reward.0.kind: module 'scorring' is not in the job's code.*: scoring.py"
        with pytest.raises(ConfigError, match=text):
            await mine.submit(misspelt)
        with pytest.raises(InvalidError, match="content-type: '' is not application/zip"):
            await mine.send(RestCall("POST", "/v1/code", CodeView, headers={"content-type": ""}))
        with pytest.raises(InvalidError, match="code: not a zip archive"):
            await mine.upload(archive_of(b"no archive"))
    async with AsyncClient(url, token=reader) as mine:
        with pytest.raises(PermissionDeniedError):
            await mine.upload(archive_of(b"PK"))


async def test_code_of_one_tenant_is_unknown_to_others(url: str, tmp_path: Path) -> None:
    async with AsyncClient(url, token=ADMIN) as admin:
        tokens = {
            tenant: (await admin.create_token(tenant, role="submit", tenant=tenant)).secret
            for tenant in ("a", "b")
        }
        await admin.set_quota("b", quota=Quota(code_bytes=1))
    job = job_with_code(tmp_path / "job")
    async with AsyncClient(url, token=tokens["a"]) as mine:
        spec = (await mine.submit(job)).spec
    async with AsyncClient(url, token=tokens["b"]) as others:
        with pytest.raises(ConfigError, match=r"code.digest: tenant 'b' has not uploaded"):
            await others.submit({**spec, "tenant": "b"})
        with pytest.raises(LimitError, match=r"limit code_bytes: \d+ bytes, and tenant 'b'"):
            await others.submit(job)
        without = {**spec, "tenant": "b", "code": {"path": "", "digest": ""}}
        with pytest.raises(ConfigError, match=r"code.digest: is missing; `paceline submit`"):
            await others.submit(without)


async def test_a_submit_over_the_quota_is_refused_once(
    url: str, client: Client, tmp_path: Path
) -> None:
    write_empty_model(tmp_path)
    job = {
        "name": "sums",
        "tenant": "a",
        "model": {"path": str(tmp_path)},
        "tasks": {"environment": "arithmetic"},
        "reward": ["exact"],
    }
    async with AsyncClient(url, token=ADMIN) as admin:
        await admin.set_quota("a", quota=Quota(submitted=1))
        await client.submit(tenant="a")
        with pytest.raises(QuotaError, match="quota submitted"):
            await admin.submit(job)
        log = await admin.list_audit(action="job.submit")
    tried = [each.count for each in log.entries if each.outcome != "ok"]
    assert tried == [1]


async def test_the_command(url: str, tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text(ADMIN)
    where = ["--url", url, "--token-file", str(secret)]

    async def run(*words: str) -> str:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "paceline.front.cli", "tenants", *words, *where),
            env={**os.environ, "COLUMNS": "200"},
            stdout=PIPE,
            stderr=STDOUT,
        )
        told, _ = await process.communicate()
        return f"{process.returncode}: {told.decode()}"

    await run("set", "a", "--jobs", "4", "--rollout-workers", "8", "--weight", "2")
    told = await run("set", "a", "--jobs", "none", "--episodes", "100")
    cells = " ".join(told.split("\n")[1].split())
    assert told.startswith("0: ")
    assert cells == "a 0 of 100 0 of any 0 of 8 0 of 100 0 B of 16 GiB 2 its own"
    told = await run("set", "a", "--task-bytes", str(1 << 20), "--submitted", "none")
    assert "0 of any" in told
    assert "0 B of 1 MiB" in told
    assert "task_bytes" in await run("set", "a", "--task-bytes", str(1 << 40))
    assert "0 of 100" in await run("list")
    assert "nothing to set" in await run("set", "a")
    assert "2: paceline: jobs" in await run("set", "a", "--jobs=-3")
    assert "default" in await run("reset", "a")
    assert "a" not in (await run("list")).split()
