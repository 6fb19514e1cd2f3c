"""What is wrong with one job costs the workers of other jobs nothing."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from paceline.config.quota import Quota
from paceline.enums import GiveBackReason
from paceline.errors import StoreError, UnavailableError
from paceline.v1 import experience_pb2
from paceline_experience.api.experience import _key_to  # pyright: ignore[reportPrivateUsage]
from paceline_experience.dispatch.dispatch import Dispatcher, JobKey, LeaseDelta, WorkerReport
from paceline_experience.dispatch.presence import Presence
from paceline_experience.dispatch.slots import SlotAccounting
from paceline_experience.ledger.ledger import EpisodeKey
from paceline_experience.store.keys import JobKeys
from paceline_experience.store.store import Store
from paceline_harness.patience import PATIENCE_S
from paceline_test_wayward import Wayward

if TYPE_CHECKING:
    from paceline_harness.ledgers.site import Site, Sites

BROKEN, WHOLE = "a-broken", "b-whole"


class Unlimited:
    def quota(self, tenant: str) -> Quota:
        del tenant
        return Quota()

    def leased_elsewhere(self, tenant: str) -> int:
        del tenant
        return 0

    stored_bytes = leased_elsewhere


class Service:
    """Lease streams over two jobs."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.jobs: dict[str, str] = {}
        self.accounting = SlotAccounting(site.ledgers)
        self.presence = Presence(site.ledgers, return_s=60.0)
        self.dispatcher = Dispatcher(
            site.ledgers,
            accounting=self.accounting,
            quotas=Unlimited(),
            presence=self.presence,
        )

    async def begin(self, **of_the_broken: Any) -> Service:
        for name, experience in ((BROKEN, of_the_broken), (WHOLE, {})):
            await self.site.submit(name=name, experience=experience)
            await self.site.begin(0)
            self.jobs[name] = self.site.job_id
        return self

    def entry(self, name: str) -> Any:
        return self.site.ledgers.active[self.jobs[name]]

    def serve(self, *told: WorkerReport) -> AsyncIterator[LeaseDelta]:
        """To a worker that says this, and stays."""

        async def messages() -> AsyncIterator[WorkerReport]:
            for each in told:
                yield each
            await asyncio.Event().wait()

        return self.dispatcher.serve(messages())

    async def first(self, *told: WorkerReport) -> LeaseDelta:
        async with aclosing(cast(Any, self.serve(*told))) as handouts:
            return await asyncio.wait_for(anext(handouts), PATIENCE_S)

    def broken_by(self, error: Exception, *verbs: str) -> None:
        async def fails(*_: Any, **__: Any) -> Any:
            raise error

        ledger = self.entry(BROKEN).ledger
        for verb in verbs:
            setattr(ledger.leases if verb in ("lease", "release") else ledger, verb, fails)


@pytest.fixture
async def service(sites: Sites, store: Store, tmp_path: Path) -> AsyncIterator[Service]:
    made = Service(sites(store, tmp_path))
    yield made
    await made.site.ledgers.close()


def given(handout: LeaseDelta) -> set[str]:
    return {each.job_id for each in handout.assignments}


@pytest.fixture
def deeds() -> Iterator[dict[str, Callable[[], Any]]]:
    """What the sampler `wilful` does instead of what it should."""
    Wayward.deeds.clear()
    yield Wayward.deeds
    Wayward.deeds.clear()


@pytest.mark.parametrize(
    ("verb", "deed", "says"),
    [
        ("next", lambda: 1 / 0, "ZeroDivisionError: division by zero"),
        ("next", lambda: "7", "TypeError: 'str' object cannot be interpreted as an integer"),
        ("next", lambda: sys.exit(3), "SystemExit: 3"),
        ("state", lambda: 1 / 0, "ZeroDivisionError: division by zero"),
        ("state", lambda: {"at": b""}, "TypeError: Object of type bytes is not JSON serializable"),
        ("load", lambda: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
async def test_a_sampler_that_fails_ends_its_own_job(
    service: Service, deeds: dict[str, Callable[[], Any]], verb: str, deed: Any, says: str
) -> None:
    await service.begin(sampler={"kind": "wilful"})
    deeds[verb] = deed
    if verb == "load":  # the store is read anew
        meta = JobKeys("default", service.jobs[BROKEN]).meta
        await service.site.store.command("HINCRBY", meta, "revision", 1)
    handout = await service.first(WorkerReport("w", credits=16))
    assert service.jobs[WHOLE] in given(handout)
    await service.site.sweep()
    status = (await service.site.jobs.get(service.jobs[BROKEN])).status
    assert (status.state, status.reason) == ("failed", f"experience.sampler: wilful: {says}")
    assert (await service.site.jobs.get(service.jobs[WHOLE])).status.state == "running"


ERRORS = [RuntimeError("bad state"), UnavailableError("owned by another"), StoreError("refused")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_a_ledger_that_fails_to_lease_costs_other_jobs_nothing(
    service: Service, error: Exception
) -> None:
    await service.begin()
    service.broken_by(error, "lease", "refresh")
    for worker_id in ("v", "w"):
        assert given(await service.first(WorkerReport(worker_id, credits=4))) == {
            service.jobs[WHOLE]
        }
    assert service.accounting.reserved(service.jobs[BROKEN]) > 0
    assert service.accounting.reserved(service.jobs[WHOLE]) == 0


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_a_failing_ledger_does_not_block_other_reports(
    service: Service, error: Exception
) -> None:
    await service.begin()
    before = await service.first(WorkerReport("w", credits=16))
    assert given(before) == set(service.jobs.values())
    service.broken_by(error, "lease", "renew", "give_back", "release")
    told = [
        JobKey(each.job_id, EpisodeKey(each.group_id, index, attempt, GiveBackReason.DRAIN))
        for each in before.assignments
        for index, attempt in zip(each.indices, each.attempts, strict=True)
    ]
    message = WorkerReport("w", credits=16, renew=told, give_back=told, renew_is_complete=True)
    after = await service.first(message)
    assert given(after) == {service.jobs[WHOLE]}
    assert not after.abort


async def test_episodes_of_a_dead_worker_are_leased_again_despite_a_failing_ledger(
    service: Service,
) -> None:
    await service.begin()
    await service.first(WorkerReport("w", credits=16))
    service.broken_by(RuntimeError("bad state"), "release")
    service.presence.lost("w")
    await service.presence.sweep()
    assert [service.entry(name).ledger.held("w") for name in service.jobs] == [8, 0]


async def test_what_was_leased_before_the_store_went_away_is_handed_out(service: Service) -> None:
    await service.begin()
    asked: list[str] = []

    def leasing(name: str) -> Callable[..., Any]:
        whole = service.entry(name).ledger.leases.lease

        async def lease(**wanted: Any) -> Any:
            asked.append(service.jobs[name])
            service.site.store.unreachable = len(asked) > 1
            if service.site.store.unreachable:
                raise StoreError("the store cannot be reached")
            return await whole(**wanted)

        return lease

    for name in service.jobs:
        service.entry(name).ledger.leases.lease = leasing(name)
    handouts = service.serve(WorkerReport("w", credits=8))
    assert given(await asyncio.wait_for(anext(handouts), PATIENCE_S)) == {asked[0]}
    with pytest.raises(StoreError, match="cannot be reached"):
        await asyncio.wait_for(anext(handouts), PATIENCE_S)
    assert len(asked) == 2


async def test_a_worker_is_told_at_once_what_is_recalled(service: Service) -> None:
    """A batch is full, so what the other worker still runs has to wait for newer weights."""
    site = service.site
    april = {"mode": "april", "batch_groups": 1, "max_staleness": 1, "filters": []}
    await site.submit(name="c-april", experience={**april, "group_size": 2})
    await site.begin(0)
    async with aclosing(cast(Any, service.serve(WorkerReport("w", credits=2)))) as handouts:
        (mine,) = (await asyncio.wait_for(anext(handouts), PATIENCE_S)).assignments
        await site.play()
        told = await asyncio.wait_for(anext(handouts), PATIENCE_S)
    assert not told.assignments
    assert [(each.job_id, each.key) for each in told.abort] == [
        (
            site.job_id,
            EpisodeKey(mine.group_id, index, 1, GiveBackReason.DRAIN),
        )
        for index in range(2)
    ]
    message = _key_to(told.abort[0])
    assert message.reason == experience_pb2.GIVE_BACK_REASON_DRAIN
