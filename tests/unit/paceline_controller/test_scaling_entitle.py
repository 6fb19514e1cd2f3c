from hypothesis import given
from hypothesis import strategies as st

from paceline_controller.jobs.queue import PoolClaim
from paceline_controller.scaling.entitle import WorkerDemand, entitled, fill

NAMES = ("a", "b", "c", "d")


@st.composite
def wants(draw: st.DrawFn) -> dict[str, WorkerDemand]:
    found: dict[str, WorkerDemand] = {}
    for name in draw(st.sets(st.sampled_from(NAMES), min_size=1)):
        floor = draw(st.integers(0, 5))
        held = floor + draw(st.integers(0, 10))
        weight = draw(st.sampled_from([0.5, 1.0, 2.0]))
        found[name] = WorkerDemand(floor, held, held + draw(st.integers(0, 10)), weight)
    return found


CLAIMS = st.lists(
    st.builds(
        PoolClaim,
        job_id=st.just("q"),
        tenant=st.sampled_from(["t", "u", "v"]),
        pool=st.just("p"),
        workers=st.integers(1, 8),
        pressing=st.booleans(),
    ),
    max_size=4,
)


@given(st.integers(0, 40), wants())
def test_shares_add_up_and_never_exceed_demand(total: int, asked: dict[str, WorkerDemand]) -> None:
    found = fill(total, asked)
    floors = sum(want.floor for want in asked.values())
    wishes = sum(want.wish for want in asked.values())
    assert sum(found.values()) == max(floors, min(total, wishes))
    assert all(want.floor <= found[name] <= want.wish for name, want in asked.items())


@given(st.integers(0, 40), wants())
def test_shares_are_max_min_fair(total: int, asked: dict[str, WorkerDemand]) -> None:
    found = fill(total, asked)
    for poor, want in asked.items():
        for rich, other in asked.items():
            if found[poor] < want.wish and found[rich] > other.floor:
                assert (found[rich] - 1) / other.weight <= found[poor] / want.weight


@given(st.integers(1, 40), wants(), st.data())
def test_jobs_keep_what_they_must_have(
    total: int, asked: dict[str, WorkerDemand], data: st.DataObject
) -> None:
    owners = {name: data.draw(st.sampled_from(["t", "u"])) for name in asked}
    claims = data.draw(CLAIMS)
    found = entitled(total, asked, owners, claims, {"t": 2.0})
    assert found.keys() == asked.keys()
    if sum(want.floor for want in asked.values()) <= total:
        assert all(found[name] >= want.floor for name, want in asked.items())


@given(wants(), st.data())
def test_without_contention_every_demand_is_met(
    asked: dict[str, WorkerDemand], data: st.DataObject
) -> None:
    owners = {name: data.draw(st.sampled_from(["t", "u"])) for name in asked}
    total = sum(want.wish for want in asked.values())
    found = entitled(total, asked, owners, (), {})
    assert all(found[name] >= want.held for name, want in asked.items())


def test_an_idle_tenant_gets_its_share_of_a_full_pool() -> None:
    asked = {"a1": WorkerDemand(1, 8, 8), "b1": WorkerDemand(1, 0, 6)}
    owners = {"a1": "a", "b1": "b"}
    assert entitled(8, asked, owners, (), {}) == {"a1": 4, "b1": 4}
    assert entitled(8, asked, owners, (), {"a": 3.0}) == {"a1": 6, "b1": 2}


def test_many_jobs_of_a_tenant_share_what_one_job_of_another_has() -> None:
    asked = {f"a{i}": WorkerDemand(1, 2, 4) for i in range(4)} | {"b1": WorkerDemand(1, 0, 8)}
    owners = {name: name[0] for name in asked}
    found = entitled(8, asked, owners, (), {})
    assert found == {"a0": 1, "a1": 1, "a2": 1, "a3": 1, "b1": 4}


def test_room_is_made_for_a_queued_job_if_it_fits_into_its_tenants_share() -> None:
    asked, owners = {"a1": WorkerDemand(1, 8, 8)}, {"a1": "a"}
    fits = PoolClaim("b1", "b", "p", 4, pressing=False)
    large = PoolClaim("b1", "b", "p", 6, pressing=False)
    pressing = PoolClaim("b1", "b", "p", 6, pressing=True)
    never = PoolClaim("b1", "b", "p", 8, pressing=True)
    assert entitled(8, asked, owners, [fits], {}) == {"a1": 4}
    assert entitled(8, asked, owners, [large], {}) == {"a1": 8}
    assert entitled(8, asked, owners, [pressing], {}) == {"a1": 2}
    assert entitled(8, asked, owners, [never], {}) == {"a1": 8}


def test_a_tenant_makes_room_for_its_own_queued_job() -> None:
    claim = PoolClaim("a2", "a", "p", 3, pressing=False)
    assert entitled(8, {"a1": WorkerDemand(1, 8, 8)}, {"a1": "a"}, [claim], {}) == {"a1": 5}
