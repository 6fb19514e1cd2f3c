"""Tokens in use: tenants of jobs, revocation, outages, the audit log, the command line."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from paceline.errors import AuthenticationError, NotFoundError, PermissionDeniedError
from paceline_harness.patience import PATIENCE_S

if TYPE_CHECKING:
    from conftest import Site
else:
    Site = Any


async def paceline(site: Site, *words: str) -> tuple[int | None, str, str]:
    """Run the command on this run directory; returns exit code, stdout and stderr."""
    made = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "paceline.front.cli", *words, "--run-dir", str(site.run_dir)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"COLUMNS": "250"},
    )
    out, said = await asyncio.wait_for(made.communicate(), PATIENCE_S)
    return made.returncode, out.decode(), said.decode()


async def forever(client: Any) -> None:
    while True:
        await client.list()
        await asyncio.sleep(0.1)


def test_the_bootstrap_token_is_readable_by_its_owner_only(site: Site) -> None:
    path = site.run_dir / "token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert site.bootstrap.startswith("pl_bootstrap_")


async def test_a_job_gets_the_tenant_of_the_token(peopled: Site, job: dict[str, Any]) -> None:
    async with peopled.client("submit-b") as client:
        for more in ({}, {"tenant": "default"}, {"tenant": "b"}):
            made = await client.submit(job | more)
            assert (made.status.tenant, made.spec["tenant"]) == ("b", "b")
        with pytest.raises(PermissionDeniedError, match=r"^tenant: 'a' is not the tenant"):
            await client.submit(job | {"tenant": "a"})
        assert {each.status.tenant for each in (await client.list()).jobs} == {"b"}
    async with peopled.client("all") as client:
        assert (await client.submit(job)).status.tenant == "default"
        assert (await client.submit(job | {"tenant": "a"})).status.tenant == "a"


async def test_a_token_without_code_brings_none(
    peopled: Site, job: dict[str, Any], tmp_path: Path
) -> None:
    """Neither a folder of its own nor one that another token of its tenant has uploaded."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "scoring.py").write_text("def score(item): return 1.0")
    own = job | {"code": {"path": str(tmp_path / "own")}, "reward": [{"kind": "scoring:score"}]}
    async with peopled.client("submit-a") as client:
        made = await client.submit(own)
    uploaded = own | {"code": made.spec["code"]}
    for who, role in (("plain", "submit"), ("plain admin", "admin")):
        await peopled.make(who, role=role, tenant="a", no_code=True)
        async with peopled.client(who) as client:
            for each in (own, uploaded):
                with pytest.raises(PermissionDeniedError, match=r"^code: jobs of this token"):
                    await client.submit(each)
            assert (await client.submit(job)).status.tenant == "a"
    async with peopled.client("plain admin") as client:
        with pytest.raises(PermissionDeniedError, match="may bring none"):
            await client.create_token("more", role="submit")
        made_token = await client.create_token("as much", role="submit", no_code=True)
        assert made_token.token.no_code
        refused = [
            (each.principal.name, each.action)
            for each in (await client.list_audit()).entries
            if each.outcome == "refused"
        ]
    assert {("plain", "code.upload"), ("plain", "job.submit")} <= {*refused}


async def test_one_key_of_two_tenants_makes_two_jobs(peopled: Site, job: dict[str, Any]) -> None:
    made: list[str] = []
    for who in ("submit-a", "submit-b"):
        async with peopled.client(who) as client:
            made.append((await client.submit(job, request_id="same")).status.job_id)
    assert made[0] != made[1]


async def test_a_revoked_token_opens_nothing_soon(peopled: Site) -> None:
    async with peopled.client("read-a") as client, peopled.client("admin-a") as admin:
        await client.list()
        await admin.revoke_token(peopled.ids["read-a"])
        with pytest.raises(AuthenticationError):
            await asyncio.wait_for(forever(client), PATIENCE_S)


async def test_a_revoked_token_ends_open_events(peopled: Site) -> None:
    headers = {"authorization": f"Bearer {peopled.tokens['read-a']}"}
    url = f"/v1/jobs/{peopled.ids['job']}/events"
    async with (
        httpx.AsyncClient(base_url=peopled.url, timeout=PATIENCE_S) as http,
        peopled.client("admin-a") as admin,
        http.stream("GET", url, headers=headers) as response,
    ):
        lines = response.aiter_lines()
        assert (await anext(lines)).startswith("id: ")
        await admin.revoke_token(peopled.ids["read-a"])
        async with asyncio.timeout(PATIENCE_S):
            assert "event: end" not in [line async for line in lines]


async def test_the_controller_has_a_name_of_its_own(peopled: Site, job: dict[str, Any]) -> None:
    from paceline.platform.transport.principal import derived_token

    peopled.tokens["controller"] = derived_token(peopled.bootstrap, "controller")
    async with peopled.client("controller") as client:
        made = await client.submit(job | {"tenant": "c"})
        with pytest.raises(PermissionDeniedError):
            await client.list_tokens()
    async with peopled.client() as client:
        (entry,) = (await client.list_audit(action="job.submit", tenant="c")).entries
    assert (entry.principal.name, entry.target, entry.outcome) == (
        "controller",
        made.status.job_id,
        "ok",
    )
    assert entry.principal.source == "127.0.0.1"


async def test_refusals_are_in_the_audit_log(peopled: Site) -> None:
    async with httpx.AsyncClient(base_url=peopled.url, timeout=PATIENCE_S) as http:
        for _ in range(3):
            forged = {"x-forwarded-for": "9.9.9.9", "forwarded": "for=9.9.9.9"}
            await http.get("/v1/jobs", headers={"authorization": "Bearer x", **forged})
    async with peopled.client("read-a") as client:
        with pytest.raises(PermissionDeniedError):
            await client.cancel(peopled.ids["job"])
    told: Counter[tuple[str, ...]] = Counter()
    async with peopled.client() as client, asyncio.timeout(PATIENCE_S):
        while told.total() < 4:
            entries = (await client.list_audit(page_size=1000)).entries
            # Equal ones are one entry, or two: the time to write them may come in between.
            told.clear()
            for e in entries:
                if e.outcome == "refused":
                    told[e.principal.name, e.action, e.detail, e.principal.source, e.tenant] += (
                        e.count
                    )
            await asyncio.sleep(0.2)
    assert told == {
        ("", "GET /v1/jobs", "invalid", "127.0.0.1", "*"): 3,
        ("read-a", "POST /v1/jobs/{job_id}/cancel", "role", "127.0.0.1", "a"): 1,
    }


async def test_the_command_makes_lists_and_revokes(site: Site, job: dict[str, Any]) -> None:
    code, secret, said = await paceline(
        site, "tokens", "create", "ann", "--role", "read", "--tenant", "a", "--days", "2"
    )
    assert (code, "not shown again" in said) == (0, True)
    code, listed, _ = await paceline(site, "tokens", "list")
    assert code == 0
    assert "ann" in listed
    assert "in 2 d" in listed
    assert secret.strip() not in listed
    token_id = secret.split("_")[1]
    assert (await paceline(site, "tokens", "revoke", token_id))[:2] == (0, f"{token_id}: revoked\n")
    code, text, _ = await paceline(site, "audit-log", "--json", "--action", "token.")
    entries = [json.loads(line) for line in text.splitlines()]
    assert [entry["action"] for entry in entries] == ["token.create", "token.revoke"]
    assert secret.strip() not in text


async def test_the_other_tenants_token_cannot_be_revoked(peopled: Site) -> None:
    async with peopled.client("admin-b") as client:
        with pytest.raises(NotFoundError):
            await client.revoke_token(peopled.ids["read-a"])
    async with peopled.client("read-a") as client:
        await client.list()


async def test_a_new_token_is_a_new_resource(peopled: Site) -> None:
    headers = {"authorization": f"Bearer {peopled.tokens['all']}"}
    async with httpx.AsyncClient(base_url=peopled.url, timeout=PATIENCE_S, headers=headers) as http:
        made = await http.post("/v1/tokens", json={"name": "ann", "tenant": "a", "role": "read"})
        assert (made.status_code, made.json()["token"]["role"]) == (201, "read")
        wrong = await http.post("/v1/tokens", json={"name": "ann", "role": "root"})
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (422, "InvalidError")
