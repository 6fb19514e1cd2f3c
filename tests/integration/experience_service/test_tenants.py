"""Quotas and fair shares of tenants, over gRPC and across restarts of the service."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from grpc.aio import AioRpcError

from paceline.config.limits import LimitSettings
from paceline.config.quota import Quota
from paceline.enums import JobState
from paceline.errors import (
    ConfigError,
    InvalidError,
    LimitError,
    PacelineError,
    PermissionDeniedError,
    QuotaError,
)
from paceline.front.api.tenants import SIZES, Tenant, TenantUsage, quota_to, tenant_from
from paceline.platform.transport.principal import Principal, Role
from paceline.v1 import experience_pb2 as ex
from paceline.v1 import options_pb2, roster_pb2, types_pb2
from paceline.v1 import tenants_pb2 as pb
from paceline_experience.store.keys import JobKeys
from paceline_experience.store.store import Store
from paceline_harness.patience import PATIENCE_S, call

if TYPE_CHECKING:
    from paceline_harness.experience_service.clients import Client
    from paceline_harness.experience_service.serving import Killable, Lives

WIDE = {"batch_groups": 2, "group_size": 4, "max_staleness": 40, "lease_s": 100.0}


async def set_quota(client: Client, tenant: str, **limits: Any) -> Tenant:
    request = pb.SetQuotaRequest(tenant=tenant, quota=quota_to(Quota(**limits)))
    return tenant_from(await call(client.tenants.SetQuota, request))


async def tenants(client: Client, only: str = "") -> dict[str, Tenant]:
    reply = await call(client.tenants.ListTenants, pb.ListTenantsRequest(tenant=only))
    return {each.name: tenant_from(each) for each in reply.tenants}


async def begun(client: Client, tenant: str, **experience: Any) -> str:
    """A job with a first version, whose episodes can be leased."""
    job = await client.submit(tenant=tenant, eval=None, experience=WIDE | experience)
    trainer = client.trainer(job.status.job_id)
    await trainer.begin(0)
    await trainer.publish_version(0)
    return job.status.job_id


async def leased(client: Client, worker_id: str, credits: int, expect: int) -> Counter[str]:
    """Wait until a worker with these credits has been leased `expect` episodes per job."""
    more = asyncio.Event()

    async def requests() -> AsyncIterator[ex.LeaseRequest]:
        yield ex.LeaseRequest(worker_id=worker_id, credits=credits)
        await more.wait()

    found: Counter[str] = Counter()
    async for reply in client.lease(requests()):
        for given in reply.assignments:
            found[given.job_id] += len(given.indices)
        if found.total() >= expect:
            more.set()
    return found


async def test_more_jobs_than_may_be_submitted_are_refused(client: Client) -> None:
    await set_quota(client, "a", submitted=2)
    first = await client.submit("one", tenant="a")
    await client.submit(tenant="a")
    with pytest.raises(QuotaError, match="quota submitted: tenant 'a' has 2 jobs"):
        await client.submit(tenant="a")
    assert (await client.submit("one", tenant="a")).status.job_id == first.status.job_id
    await client.submit(tenant="b")
    await client.set_state(first.status.job_id, JobState.CANCELLING)
    await client.set_state(first.status.job_id, JobState.CANCELLED)
    await client.submit(tenant="a")


async def test_quotas_and_use_are_listed_and_reset(client: Client) -> None:
    made = await set_quota(client, "new", jobs=3, weight=2.0)
    assert made == Tenant("new", Quota(jobs=3, weight=2.0), is_custom=True)
    job_id = await begun(client, "a")
    worker = types_pb2.Worker(worker_id="r1", kind=options_pb2.WORKER_KIND_ROLLOUT, job_id=job_id)
    rollout = await client.rollout(job_id, "r1")
    await call(rollout.roster.Join, roster_pb2.JoinRequest(worker=worker))
    await client.submit(tenant="a")
    assert await leased(client, "e", 4, 4) == {job_id: 4}
    found = await tenants(client)
    usage = TenantUsage(submitted=2, jobs=1, rollout_workers=1, episodes=4)
    assert replace(found["a"].usage, **dict.fromkeys(SIZES, 0)) == usage
    assert found == {"a": Tenant("a", usage=found["a"].usage), "new": made}
    for name in ("spec_bytes", "model_files_bytes", "task_bytes"):
        assert 0 < getattr(found["a"].usage, name) < getattr(found["a"].quota, name)
    assert list(await tenants(client, "nobody")) == ["nobody"]
    await call(client.tenants.SetQuota, pb.SetQuotaRequest(tenant="new"))
    assert "new" not in await tenants(client)


async def test_a_job_above_a_size_of_its_tenant_is_refused_and_an_admin_can_raise_it(
    client: Client,
) -> None:
    await set_quota(client, "a", spec_bytes=100)
    with pytest.raises(LimitError, match=r"spec_bytes: \d+ bytes.*'a' is allowed 100.*admin"):
        await client.submit(tenant="a")
    await set_quota(client, "a", model_files_bytes=1)
    with pytest.raises(LimitError, match=r"model_files_bytes: \d+ bytes.*'a' is allowed 1;"):
        await client.submit(tenant="a")
    await client.submit(tenant="b")
    await call(client.tenants.SetQuota, pb.SetQuotaRequest(tenant="a"))
    await client.submit(tenant="a")


async def test_no_episode_starts_above_the_byte_quota_of_a_tenant(client: Client) -> None:
    full, free = await begun(client, "a"), await begun(client, "b")
    await set_quota(client, "a", stored_bytes=0)
    assert await leased(client, "e", 8, 8) == {free: 8}
    await set_quota(client, "a", stored_bytes=1)
    assert (await leased(client, "f", 8, 8))[full] == 8


async def test_bad_quotas_are_refused(client: Client) -> None:
    with pytest.raises(InvalidError, match="tenant: 'No!'"):
        await set_quota(client, "No!", jobs=1)
    for quota in (pb.Quota(jobs=-1), pb.Quota(weight=-2.0), pb.Quota(weight=float("nan"))):
        with pytest.raises(ConfigError):
            await call(client.tenants.SetQuota, pb.SetQuotaRequest(tenant="a", quota=quota))


async def test_a_tenant_sees_its_own_and_sets_nothing(client: Client) -> None:
    await set_quota(client, "a", jobs=1)
    await set_quota(client, "b", jobs=2)
    who = Principal("t1", "reader", "a", Role.READ)
    listing = pb.ListTenantsRequest()
    reply = await call(client.tenants.ListTenants, listing, on_behalf_of=who)
    assert [each.name for each in reply.tenants] == ["a"]
    other = pb.ListTenantsRequest(tenant="b")
    assert not (await call(client.tenants.ListTenants, other, on_behalf_of=who)).tenants
    change = pb.SetQuotaRequest(tenant="a", quota=pb.Quota(jobs=9))
    for refused in (who, Principal("t2", "admin", "a", Role.ADMIN)):
        with pytest.raises(PermissionDeniedError):
            await call(client.tenants.SetQuota, change, on_behalf_of=refused)
    assert (await tenants(client))["a"].quota == Quota(jobs=1)


async def test_a_queued_job_shows_why_it_waits(client: Client) -> None:
    job_id = (await client.submit()).status.job_id
    request = ex.SetJobStateRequest(
        job_id=job_id, state=types_pb2.JOB_STATE_QUEUED, reason="waits in position 1"
    )
    status = (await call(client.experience.SetJobState, request)).status
    assert (status.state, status.reason) == (types_pb2.JOB_STATE_QUEUED, "waits in position 1")
    assert (await client.set_state(job_id, JobState.STARTING)).status.reason == ""
    with pytest.raises(PacelineError):
        await call(client.experience.SetJobState, request)


async def test_slots_are_shared_between_tenants_not_jobs(client: Client) -> None:
    many = [await begun(client, "a") for _ in range(5)]
    one = await begun(client, "b")
    found = await leased(client, "e", 40, 40)
    assert found[one] == 20
    assert {found[job_id] for job_id in many} == {4}


async def test_a_weight_counts(client: Client) -> None:
    await set_quota(client, "b", weight=3.0)
    a, b = await begun(client, "a"), await begun(client, "b")
    assert await leased(client, "e", 64, 64) == {a: 16, b: 48}


async def test_the_quota_of_episodes_holds_over_jobs_and_workers(client: Client) -> None:
    await set_quota(client, "a", episodes=10)
    mine = {await begun(client, "a") for _ in range(3)}
    other = await begun(client, "b")
    counts = await asyncio.gather(*(leased(client, f"e{i}", 30, 20) for i in range(3)))
    total = sum(counts, Counter[str]())
    assert sum(total[job_id] for job_id in mine) == 10
    assert total[other] >= 50
    usage = (await tenants(client))["a"].usage
    assert usage.episodes == 10


async def test_a_quota_that_is_lowered_takes_nothing_back(client: Client) -> None:
    job_id = await begun(client, "a")
    assert await leased(client, "e", 8, 8) == {job_id: 8}
    await set_quota(client, "a", episodes=2)
    audit = await client.verify(job_id)
    assert audit.counts["leased"] == 8
    waiting = asyncio.create_task(leased(client, "f", 8, 1))
    done, _ = await asyncio.wait({waiting}, timeout=0.5)
    assert not done
    await set_quota(client, "a", episodes=9)
    assert await waiting == {job_id: 1}


async def test_the_default_quota_applies_without_a_custom_one(
    lives: Lives, store_url: str, tmp_path: Path
) -> None:
    async with lives(
        store_url, tmp_path, limits=LimitSettings(tenant=Quota(submitted=1))
    ) as client:
        await set_quota(client, "b", submitted=2)
        for tenant in ("a", "b", "b"):
            await client.submit(tenant=tenant)
        for tenant in ("a", "b"):
            with pytest.raises(QuotaError):
                await client.submit(tenant=tenant)
    async with lives(
        store_url, tmp_path, limits=LimitSettings(tenant=Quota(submitted=2))
    ) as client:
        await client.submit(tenant="a")
        with pytest.raises(QuotaError):
            await client.submit(tenant="b")


class Player:
    """A slow environment worker that survives restarts of the service."""

    def __init__(self, name: str, service: Killable, seed: int) -> None:
        self._name = name
        self._service = service
        self._chance = random.Random(seed)
        self.played = 0

    async def run(self) -> None:
        while True:
            try:
                async with self._service.connected() as client, asyncio.TaskGroup() as episodes:
                    await self._lease(client, episodes)
            except* (PacelineError, AioRpcError, TimeoutError):
                await asyncio.sleep(0.05)

    async def _lease(self, client: Client, episodes: asyncio.TaskGroup) -> None:
        told: asyncio.Queue[ex.LeaseRequest] = asyncio.Queue()
        told.put_nowait(ex.LeaseRequest(worker_id=self._name, credits=12))

        async def requests() -> AsyncIterator[ex.LeaseRequest]:
            while True:
                yield await told.get()

        async def play(given: types_pb2.Assignment, place: int) -> None:
            await asyncio.sleep(self._chance.uniform(0.02, 0.3))
            made = [client.trajectory(given, place)]
            request = ex.SubmitRequest(job_id=given.job_id, trajectories=made)
            await call(client.experience.Submit, request)
            self.played += 1
            told.put_nowait(ex.LeaseRequest(credits=1))

        async for reply in client.lease(requests()):
            for given in reply.assignments:
                for place in range(len(given.indices)):
                    episodes.create_task(play(given, place))


async def in_flight(store: Store, jobs: list[tuple[str, str]]) -> Counter[str]:
    """Leased episodes by tenant, in one snapshot of the store."""
    found: Counter[str] = Counter()
    keys = [JobKeys(tenant, job_id).counts for tenant, job_id in jobs]
    for (tenant, _), counts in zip(jobs, await store.hashes(*keys), strict=True):
        found[tenant] += int(counts.get(b"leased", 0)) + int(counts.get(b"eval:leased", 0))
    return found


@pytest.mark.timeout(900)
async def test_quotas_hold_while_the_service_is_killed(killable: tuple[Killable, str]) -> None:
    """Two tenants with unlimited demand, whose leases are sampled continuously."""
    service, store_url = killable
    quotas = {"a": 7, "b": 5}
    store = await Store.connect(store_url)
    async with service.connected() as client:
        for tenant, quota in quotas.items():
            await set_quota(client, tenant, episodes=quota)
        # What a killed service has handed out comes again when its leases have run out.
        jobs = [(each, await begun(client, each, lease_s=2.0)) for each in ("a", "a", "b", "b")]
    players = [Player(f"e{i}", service, seed=i) for i in range(3)]
    tasks = [asyncio.create_task(player.run()) for player in players]
    most: Counter[str] = Counter()
    for life in range(4):
        enough = sum(player.played for player in players) + 40
        async with asyncio.timeout(PATIENCE_S):
            while sum(player.played for player in players) < enough or most != quotas:
                now = await in_flight(store, jobs)
                most |= now
                assert all(now[tenant] <= quota for tenant, quota in quotas.items()), now
                await asyncio.sleep(0.002)
        if life < 3:
            service.kill()
            service.start()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with service.connected() as client:
        for _, job_id in jobs:
            await client.verify(job_id)
    await store.close()
