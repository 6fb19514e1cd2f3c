"""Jobs of a token without code that name modules; an import of theirs would leave a file behind."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
from grpc import StatusCode, aio
from redis import Redis

from paceline.platform.transport.principal import METADATA_KEY, principal_metadata, service
from paceline.v1 import jobs_pb2
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline_experience.store.keys import job_key
from paceline_harness.messages.module_names import EVIL, LISTED, MODULE, rewarded, texts
from paceline_harness.patience import PATIENCE_S

if TYPE_CHECKING:
    from conftest import Site

    from paceline.v1.jobs_pb2_grpc import JobsAsyncStub
else:
    Site = Any


@pytest.fixture
def listed() -> list[str]:
    return [LISTED]


@pytest.fixture
def deed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is there once one of the modules is imported, here or in a process that is started."""
    folder = tmp_path / "modules"
    (folder / "paceline_listed").mkdir(parents=True)
    for name in ("strangers", "paceline_listed/__init__", "paceline_listed/scores"):
        (folder / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder / "deed"


def done(deed: Path) -> bool:
    inner = deed.parent / "paceline_listed" / "deed"
    named = {"strangers", "paceline_listed", "paceline_listed.scores"} & set(sys.modules)
    return deed.exists() or inner.exists() or bool(named)


@pytest.fixture
async def stranger(deed: Path, site: Site) -> Site:
    assert not done(deed)
    await site.make("stranger", role="submit", tenant="a", no_code=True)
    return site


@pytest.fixture
async def stub(stranger: Site) -> AsyncIterator[JobsAsyncStub]:
    """The gateway's port of gRPC."""
    channel = aio.insecure_channel(stranger.grpc.removeprefix("http://"))
    yield JobsStub(channel)
    await channel.close()


async def code_of(call: Any) -> StatusCode:
    try:
        await call
    except grpc.RpcError as error:
        refused: Any = error
        return refused.code()
    return StatusCode.OK


async def test_no_job_over_rest_names_anything_else(
    stranger: Site, job: dict[str, Any], deed: Path
) -> None:
    accepted: list[str] = []
    headers = {"authorization": f"Bearer {stranger.tokens['stranger']}"}
    async with httpx.AsyncClient(
        base_url=stranger.url, headers=headers, timeout=PATIENCE_S
    ) as http:
        for what, (media, text) in texts(job).items():
            kind = {"content-type": f"application/{media}"}
            reply = await http.post("/v1/jobs", content=text.encode(), headers=kind)
            if not 400 <= reply.status_code < 500 or done(deed):
                accepted.append(f"{what}: {reply.status_code} {reply.text[:300]}")
        assert not accepted
        good = json.dumps(job | rewarded({"kind": LISTED, "any": "option"}))
        reply = await http.post("/v1/jobs", content=good.encode())
        assert reply.is_success, reply.text
    assert not done(deed)  # not even what is listed, but in children of reward workers


async def test_nothing_beside_a_job_over_grpc_helps(
    stranger: Site, stub: JobsAsyncStub, job: dict[str, Any], deed: Path
) -> None:
    own = ("authorization", f"Bearer {stranger.tokens['stranger']}")
    ((_, admin),) = principal_metadata(service("service"))
    beside: list[tuple[tuple[str, str | bytes], ...]] = [
        (own,),
        (own, (METADATA_KEY, admin)),
        ((METADATA_KEY, admin), own, (METADATA_KEY, b"")),
        (own, ("paceline-service", "gateway/" + "0" * 64)),
        (own, ("x-paceline-unlisted", EVIL), ("paceline-unlisted", EVIL)),
        (own, ("grpc-trace-bin", b"strangers:run"), ("traceparent", EVIL)),
    ]
    for spec in (rewarded(EVIL), {"code": {"digest": "0" * 64}, **rewarded(EVIL)}):
        request = jobs_pb2.SubmitJobRequest(
            spec_json=json.dumps(job | spec), files={"strangers.py": MODULE.encode()}
        )
        # Fields that no method has: an earlier or later message could have them.
        message = jobs_pb2.SubmitJobRequest.FromString(
            request.SerializeToString() + b"\x9a\x01\x0dstrangers:run"
        )
        for metadata in beside:
            code = await code_of(stub.SubmitJob(message, metadata=metadata))
            assert code in {StatusCode.INVALID_ARGUMENT, StatusCode.PERMISSION_DENIED}
    upload = jobs_pb2.UploadCodeRequest(archive=b"PK", num_bytes=2, digest="0" * 64)
    for metadata in beside:
        sent = stub.UploadCode(iter([upload]), metadata=metadata)
        assert await code_of(sent) is StatusCode.PERMISSION_DENIED
    for metadata in (((METADATA_KEY, admin),), (("paceline-service", "gateway/0"),)):
        listing = stub.ListJobs(jobs_pb2.ListJobsRequest(), metadata=metadata)
        assert await code_of(listing) is StatusCode.UNAUTHENTICATED
    assert not done(deed)


async def test_experience_itself_knows_nobody_without_a_key(
    stranger: Site, job: dict[str, Any], deed: Path
) -> None:
    ((_, admin),) = principal_metadata(service("service"))
    token = stranger.tokens["stranger"]
    async with aio.insecure_channel(stranger.experience) as channel:
        direct: JobsAsyncStub = JobsStub(channel)
        request = jobs_pb2.SubmitJobRequest(spec_json=json.dumps(job | rewarded(EVIL)))
        beside: list[tuple[tuple[str, str | bytes], ...]] = [
            (),
            ((METADATA_KEY, admin),),
            (("authorization", f"Bearer {token}"), (METADATA_KEY, admin)),
            (("authorization", f"Bearer {stranger.bootstrap}"),),
            (("paceline-service", f"gateway/{token}"), (METADATA_KEY, admin)),
            (("paceline-service-bin", b"gateway/"), ("insecure", "true")),
        ]
        for metadata in beside:
            for sent in (
                direct.SubmitJob(request, metadata=metadata),
                direct.GetJob(jobs_pb2.GetJobRequest(job_id="a"), metadata=metadata),
            ):
                assert await code_of(sent) is StatusCode.PERMISSION_DENIED
    assert not done(deed)


async def test_an_older_job_lends_its_names_to_nobody(
    stranger: Site, socket: str, job: dict[str, Any], deed: Path
) -> None:
    """One whose record was written before functions had to be listed: it alone runs to its end."""
    headers = {"authorization": f"Bearer {stranger.tokens['stranger']}"}
    async with httpx.AsyncClient(
        base_url=stranger.url, headers=headers, timeout=PATIENCE_S
    ) as http:

        async def submit(spec: dict[str, Any], key: str) -> httpx.Response:
            return await http.post("/v1/jobs", json=spec, headers={"idempotency-key": key})

        made = (await submit(job, "first")).json()
        job_id, older = made["status"]["job_id"], made["spec"] | rewarded({"kind": EVIL})
        with Redis(unix_socket_path=socket) as redis:
            assert redis.hdel(job_key("a", job_id, "record"), "targets") == 1
            redis.set(job_key("a", job_id, "spec"), json.dumps(older))
        assert (await http.get(f"/v1/jobs/{job_id}")).status_code == 200
        for spec, key in (
            (older, "first"),  # the same request again
            (older, "second"),
            (older | {"name": job_id}, "third"),
            (older | {"fork": {"job": job_id, "step": "latest"}}, "fourth"),
            (older | {"fork": {"job": job_id, "step": 1}}, "first"),
        ):
            reply = await submit(spec, key)
            assert 400 <= reply.status_code < 500, reply.text
            assert "is not a function that jobs may name here" in reply.text
        for path in ("pause", "resume"):
            await http.post(f"/v1/jobs/{job_id}/{path}")
            assert "is not a function that jobs may name here" in (await submit(older, path)).text
    assert not done(deed)
