"""Quotas in the store, and what this process takes them to be."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from redis.asyncio import Redis, RedisCluster

from paceline.config.limits import LimitSettings
from paceline.config.quota import Quota
from paceline_experience.dispatch.slots import SlotAccounting
from paceline_experience.fleet.roster import Roster
from paceline_experience.jobs.jobs import JobStore
from paceline_experience.store.store import Store, client_of
from paceline_experience.tenancy.quotas import Quotas
from paceline_experience.usage.tenants import Tenants


class SlowStore(Store):
    """Reads hashes at once, and returns them when it may."""

    def __init__(self, redis: Redis | RedisCluster) -> None:
        super().__init__(redis)
        self.has_read, self.goes_on = asyncio.Event(), asyncio.Event()

    async def hashes(self, *keys: str) -> list[dict[bytes, bytes]]:
        contents = await super().hashes(*keys)
        self.has_read.set()
        await self.goes_on.wait()
        return contents


@pytest.fixture
def tenants(store: Store) -> Tenants:
    return tenants_of(store)


def tenants_of(store: Store) -> Tenants:
    ledgers = cast(Any, SimpleNamespace(active={}, wake=lambda: None))
    return Tenants(
        store=store,
        jobs=JobStore(store),
        ledgers=ledgers,
        roster=Roster(lease_s=10.0),
        accounting=SlotAccounting(ledgers),
        quotas=Quotas(LimitSettings()),
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, Quota(jobs=1)), (Quota(jobs=3), Quota(jobs=1)), (Quota(jobs=3), None)],
)
async def test_a_quota_that_is_set_during_a_refresh_stays(
    redis_socket: str,
    tenants: Tenants,
    before: Quota | None,
    after: Quota | None,
) -> None:
    await tenants.set("a", before)
    slow = SlowStore(client_of(f"unix://{redis_socket}"))
    other = tenants_of(slow)
    looking = asyncio.create_task(other.refresh())
    await slow.has_read.wait()
    setting = asyncio.create_task(other.set("a", after))
    await asyncio.wait({setting}, timeout=0.1)
    slow.goes_on.set()
    await asyncio.gather(looking, setting)
    assert other.quota("a") == (after or LimitSettings().tenant)
    await slow.close()


@pytest.mark.parametrize("damaged", ["{", '{"jobs": -1}', '{"of_a_later_release": 1}'])
async def test_a_quota_that_cannot_be_read_changes_nothing(
    tenants: Tenants, store: Store, damaged: str
) -> None:
    await tenants.set("a", Quota(jobs=3))
    await tenants.set("b", Quota(jobs=4))
    quotas = "{registry}:quotas"
    await store.command("HSET", quotas, "a", damaged, "new", damaged)
    await store.command("HSET", quotas, "b", Quota(jobs=5).model_dump_json())
    await tenants.refresh()
    found = [tenants.quota(name) for name in ("a", "b", "new")]
    assert found == [Quota(jobs=3), Quota(jobs=5), LimitSettings().tenant]
