"""What is repeated and changes nothing is one entry of the audit log, whatever it is."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from grpc import aio

from paceline.config.quota import Quota
from paceline.enums import WorkerKind
from paceline.errors import NotFoundError, StateError
from paceline.front.client.client import AsyncClient
from paceline.v1 import experience_pb2, types_pb2
from paceline.v1.experience_pb2_grpc import ExperienceStub
from paceline_harness.callers.service_keys import metadata_of
from paceline_harness.patience import PATIENCE_S

if TYPE_CHECKING:
    from conftest import Site
else:
    Site = Any

TIMES = 4


async def entries(client: AsyncClient) -> Counter[tuple[str, str]]:
    """How often each action on each target is in the log, and was not refused."""
    found = (await client.list_audit(page_size=1000)).entries
    return Counter((each.action, each.target) for each in found for _ in range(each.count))


async def test_what_is_repeated_is_one_entry(site: Site, job: dict[str, Any]) -> None:
    await site.make("other", role="submit", tenant="a")
    async with site.client() as client:
        job_id = ""
        for _ in range(TIMES):
            job_id = (await client.submit(job, request_id="same")).status.job_id
        for _ in range(TIMES):
            await client.pause(job_id)
        for _ in range(TIMES):
            await client.resume(job_id)
        assert await entries(client) >= Counter(
            {("job.submit", job_id): 1, ("job.pause", job_id): 1, ("job.resume", job_id): 1}
        )
        await client.pause(job_id)  # which is another pause
        for limit in (3, 4, 3):
            for _ in range(TIMES):
                await client.set_quota("a", quota=Quota(submitted=limit))
        for _ in range(TIMES):
            await client.revoke_token(site.ids["other"])
        for _ in range(TIMES):
            await client.cancel(job_id, reason="enough")
        found = await entries(client)
    assert {key: count for key, count in found.items() if key[0] != "token.create"} == {
        ("job.submit", job_id): 1,
        ("job.pause", job_id): 2,
        ("job.resume", job_id): 1,
        ("quota.set", "a"): 3,
        ("token.revoke", site.ids["other"]): 1,
        ("job.cancel", job_id): 1,
    }


async def test_a_deletion_is_one_entry_however_often_it_is_asked_for(
    site: Site, job: dict[str, Any]
) -> None:
    async with site.client() as client:
        job_id = (await client.submit(job)).status.job_id
        with pytest.raises(StateError):
            await client.delete(job_id, force=False)
        for _ in range(TIMES):
            await client.delete(job_id, force=True)
        found = await entries(client)
        assert found["job.delete", job_id] == 2  # the refusal, and the deletion
    await end(site, job_id)
    assert (await asyncio.wait_for(gone(site, job_id), PATIENCE_S)) == 2


async def end(site: Site, job_id: str) -> None:
    """What a controller does once the workers of a cancelled job are gone."""
    async with aio.insecure_channel(site.experience) as channel:
        stub: Any = ExperienceStub(channel)
        keys = site.run_dir / "keys"
        await stub.SetJobState(
            experience_pb2.SetJobStateRequest(job_id=job_id, state=types_pb2.JOB_STATE_CANCELLED),
            metadata=metadata_of(keys, WorkerKind.EXPERIENCE, WorkerKind.CONTROLLER),
        )


async def gone(site: Site, job_id: str) -> int:
    """Ask until the job is gone, then twice more; entries about its deletion."""
    async with site.client() as client:
        left = TIMES
        while left:
            try:
                await client.delete(job_id, force=True)
                await asyncio.sleep(0.1)
            except NotFoundError:
                left -= 1
        return (await entries(client))["job.delete", job_id]
