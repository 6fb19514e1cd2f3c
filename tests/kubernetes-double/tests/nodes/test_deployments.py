"""Rolling updates as a pure function, played to their end."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kubernetes_double.nodes.workloads.deployments import change_of
from kubernetes_double.nodes.workloads.pods import amount, first_to_go, is_ready

Object = dict[str, Any]


def pod(number: int, *, ready: bool = False, cost: int = 0, node: bool = True) -> Object:
    status = {"conditions": [{"type": "Ready", "status": str(ready)}]}
    return {
        "metadata": {
            "name": str(number),
            "creationTimestamp": f"2026-01-01T00:00:{number:02}Z",
            "annotations": {"controller.kubernetes.io/pod-deletion-cost": str(cost)},
        },
        "spec": {"nodeName": "a"} if node else {},
        "status": status,
    }


def amounts() -> st.SearchStrategy[int | str]:
    return st.one_of(st.integers(0, 5), st.integers(0, 100).map(lambda percent: f"{percent}%"))


@given(replicas=st.integers(0, 8), olds=st.integers(0, 8), surge=amounts(), missing=amounts())
def test_a_rolling_update_ends_and_keeps_its_bounds(
    replicas: int, olds: int, surge: int | str, missing: int | str
) -> None:
    rolling = {"maxSurge": surge, "maxUnavailable": missing}
    spec = {"replicas": replicas, "strategy": {"rollingUpdate": rolling}}
    old, fresh = [pod(n, ready=True) for n in range(olds)], list[Object]()
    numbers = iter(range(20, 60))
    most_more = amount(surge, replicas, up=True)
    most_missing = amount(missing, replicas, up=False) or (1 if most_more == 0 else 0)
    for _ in range(60):
        ready_before, before = sum(map(is_ready, (*fresh, *old))), len(fresh) + len(old)
        change = change_of(spec, fresh, old)
        fresh += [pod(next(numbers)) for _ in range(change.start)]
        old = [one for one in old if one not in change.stop]
        fresh = [one for one in fresh if one not in change.stop]
        ready = sum(map(is_ready, (*fresh, *old)))
        assert ready >= min(ready_before, replicas - most_missing)
        assert len(fresh) + len(old) <= max(before, replicas + most_more)
        waiting = [one for one in fresh if not is_ready(one)]
        if waiting:
            waiting[0]["status"] = pod(0, ready=True)["status"]
    assert not old
    assert len(fresh) == replicas


def test_recreate_starts_nothing_before_the_old_are_gone() -> None:
    spec = {"replicas": 2, "strategy": {"type": "Recreate"}}
    old = [pod(1, ready=True), pod(2)]
    change = change_of(spec, [], old)
    assert (change.start, list(change.stop)) == (0, old)
    assert change_of(spec, [], []).start == 2


def test_the_order_of_deletion() -> None:
    dear, cheap = pod(1, ready=True, cost=9), pod(2, ready=True, cost=-1)
    young, unready, unbound = pod(3, ready=True), pod(4), pod(5, ready=True, node=False)
    old = pod(0, ready=True)
    order = first_to_go([dear, cheap, old, young, unready, unbound])
    assert [one["metadata"]["name"] for one in order] == ["5", "4", "2", "3", "0", "1"]
