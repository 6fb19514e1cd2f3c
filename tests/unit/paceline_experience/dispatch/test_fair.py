import random
from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from paceline_experience.dispatch.fair import Claim, SlotGrant, TenantShare, allot

TENANTS = ("a", "b", "c")
GROUPS = st.integers(1, 8)


@st.composite
def claims(draw: st.DrawFn, *, groups: st.SearchStrategy[int] = GROUPS) -> list[Claim]:
    found: list[Claim] = []
    for number in range(draw(st.integers(0, 8))):
        group = draw(groups)
        found.append(
            Claim(
                job_id=f"j{number}",
                tenant=draw(st.sampled_from(TENANTS)),
                holds=draw(st.integers(0, 20)),
                queued=draw(st.integers(0, 12)),
                new=group * draw(st.integers(0, 4)),
                group=group,
                allow_partial=draw(st.booleans()),
            )
        )
    return found


STANDINGS = st.fixed_dictionaries(
    {
        name: st.builds(
            TenantShare,
            weight=st.sampled_from([0.5, 1.0, 3.0]),
            holds=st.integers(0, 40),
            room=st.none() | st.integers(0, 30),
        )
        for name in TENANTS
    }
)
SLOTS = st.integers(0, 64)


def by_tenant(found: dict[str, SlotGrant], wanted: list[Claim]) -> Counter[str]:
    owners = {claim.job_id: claim.tenant for claim in wanted}
    totals: Counter[str] = Counter()
    for job_id, grant in found.items():
        totals[owners[job_id]] += grant.slots
    return totals


@given(SLOTS, claims(), STANDINGS)
def test_grants_never_exceed_supply_demand_or_quota(
    slots: int, wanted: list[Claim], shares: dict[str, TenantShare]
) -> None:
    found = allot(slots, wanted, shares)
    assert sum(grant.slots for grant in found.values()) <= slots
    for claim in wanted:
        grant = found.get(claim.job_id, SlotGrant(0))
        assert grant.slots <= claim.queued + claim.new
        begun = (grant.slots - claim.queued) % claim.group
        assert grant.slots <= claim.queued or grant.partial or begun == 0
    for tenant, total in by_tenant(found, wanted).items():
        room = shares[tenant].room
        assert room is None or total <= room


@given(SLOTS, claims(groups=st.just(1)), STANDINGS)
def test_no_usable_slot_stays_empty(
    slots: int, wanted: list[Claim], shares: dict[str, TenantShare]
) -> None:
    could: Counter[str] = Counter()
    for claim in wanted:
        could[claim.tenant] += claim.queued + claim.new
    for tenant, share in shares.items():
        if share.room is not None:
            could[tenant] = min(could[tenant], share.room)
    found = allot(slots, wanted, shares)
    assert sum(grant.slots for grant in found.values()) == min(slots, could.total())


@given(SLOTS, claims(), STANDINGS)
def test_what_is_left_would_not_hold_the_group_it_is_kept_for(
    slots: int, wanted: list[Claim], shares: dict[str, TenantShare]
) -> None:
    found = allot(slots, wanted, shares)
    left = slots - sum(grant.slots for grant in found.values())
    totals = by_tenant(found, wanted)
    waiting: list[Claim] = []
    for claim in wanted:
        room, grant = shares[claim.tenant].room, found.get(claim.job_id, SlotGrant(0))
        full = room is not None and totals[claim.tenant] >= room
        if grant.slots < claim.queued + claim.new and not full and not grant.partial:
            waiting.append(claim)
    assert left == 0 or not waiting or any(left < claim.group for claim in waiting)


@given(SLOTS, claims(), STANDINGS, st.randoms(use_true_random=False))
def test_the_order_of_claims_changes_nothing(
    slots: int, wanted: list[Claim], shares: dict[str, TenantShare], chance: random.Random
) -> None:
    shuffled = list(wanted)
    chance.shuffle(shuffled)
    assert allot(slots, wanted, shares) == allot(slots, shuffled, shares)


@given(
    jobs=st.integers(1, 100),
    slots=st.integers(1, 300),
    weight=st.sampled_from([0.5, 1.0, 2.0]),
    group=st.integers(1, 8),
)
def test_many_jobs_get_no_more_than_one(jobs: int, slots: int, weight: float, group: int) -> None:
    many = [Claim(f"m{i}", "many", 0, queued=0, new=group * 300, group=group) for i in range(jobs)]
    one = Claim("one", "one", 0, queued=0, new=group * 300, group=group)
    shares = {"one": TenantShare(weight=weight), "many": TenantShare()}
    totals = by_tenant(allot(slots, [*many, one], shares), [*many, one])
    assert abs(totals["one"] / weight - totals["many"]) <= group * max(1.0, 1 / weight)


@given(
    seed=st.integers(0, 10_000),
    groups=st.lists(st.sampled_from([1, 2, 8]), min_size=2, max_size=5),
    capacity=st.integers(8, 40),
)
def test_over_time_every_tenant_gets_its_share(seed: int, groups: list[int], capacity: int) -> None:
    """One worker whose episodes end at random, and tenants that want everything."""
    chance = random.Random(seed)
    running: list[str] = []  # the job of each episode
    started: Counter[str] = Counter()
    queued: Counter[str] = Counter()
    rounds = 600
    slot_time: Counter[str] = Counter()
    for _ in range(rounds):
        running = [job for job in running if chance.random() > 0.2]
        holds = Counter(running)
        wanted = [
            Claim(
                f"j{i}",
                f"t{i}",
                holds[f"j{i}"],
                queued=queued[f"j{i}"],
                new=group * 50,
                group=group,
                allow_partial=not holds[f"j{i}"] or 4 * group > capacity,
            )
            for i, group in enumerate(groups)
        ]
        shares = {f"t{i}": TenantShare(holds=holds[f"j{i}"]) for i in range(len(groups))}
        for job, grant in allot(capacity - len(running), wanted, shares).items():
            running += [job] * grant.slots
            started[job] += grant.slots
            group = groups[int(job[1:])]
            queued[job] = (queued[job] - grant.slots) % group if grant.slots else queued[job]
        slot_time.update(running)
    fair = capacity * rounds / len(groups)
    for i, group in enumerate(groups):
        assert slot_time[f"j{i}"] >= 0.5 * fair - group * rounds / 4, (slot_time, groups)
        assert started[f"j{i}"] > 0


def test_a_tenant_at_its_quota_does_not_block_others() -> None:
    full = Claim("a1", "a", 5, queued=9)
    other = Claim("b1", "b", 50, queued=9)
    shares = {"a": TenantShare(holds=5, room=0), "b": TenantShare(holds=50)}
    assert allot(4, [full, other], shares) == {"b1": SlotGrant(4)}


def test_a_group_that_does_not_fit_keeps_what_is_left() -> None:
    large = Claim("a1", "a", 0, queued=0, new=8, group=8)
    small = Claim("b1", "b", 9, queued=0, new=9)
    shares = {"a": TenantShare(), "b": TenantShare(holds=9)}
    assert allot(5, [large, small], shares) == {}
    assert allot(9, [large, small], shares) == {"a1": SlotGrant(8), "b1": SlotGrant(1)}
    assert allot(5, [replace(large, allow_partial=True), small], shares) == {
        "a1": SlotGrant(5, partial=True)
    }


def test_a_group_is_leased_in_part_within_a_small_quota() -> None:
    job = Claim("a1", "a", 0, queued=0, new=16, group=8)
    assert allot(100, [job], {"a": TenantShare(room=10)}) == {"a1": SlotGrant(10, partial=True)}
