"""Deletion and garbage collection, one step at a time."""

from __future__ import annotations

from typing import Any

import pytest

from kubernetes_double.api.policy.deletion import DeleteOptions, delete, delete_options
from kubernetes_double.api.requests.errors import StatusError
from kubernetes_double.api.storage.objects import WriteOptions


def pod(name: str = "one", **spec: Any) -> Any:
    containers = [{"name": "c", "image": "n:1"}]
    return {"metadata": {"name": name}, "spec": {"containers": containers, **spec}}


def present(world: Any, storage: str, name: str) -> Any:
    return world.store.get(storage, world.place(storage, name).key)


def test_grace_only_shrinks(world: Any) -> None:
    world.make("pods", pod(nodeName="n", terminationGracePeriodSeconds=20))
    place = world.place("pods", "one")
    first = delete(world.objects, place, DeleteOptions())
    assert first["metadata"]["deletionGracePeriodSeconds"] == 20
    assert first["metadata"]["deletionTimestamp"] == "2026-01-01T00:00:20Z"
    world.after(5)
    longer = delete(world.objects, place, DeleteOptions(grace_s=60))
    assert longer["metadata"]["deletionTimestamp"] == "2026-01-01T00:00:20Z"
    shorter = delete(world.objects, place, DeleteOptions(grace_s=1))
    assert shorter["metadata"]["deletionTimestamp"] == "2026-01-01T00:00:06Z"
    delete(world.objects, place, DeleteOptions(grace_s=0))
    assert present(world, "pods", "one") is None


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_ended_needs_no_grace(world: Any, phase: str) -> None:
    world.make("pods", pod(nodeName="n"))
    place = world.place("pods", "one", "status")

    def end(obj: Any) -> Any:
        return {**obj, "status": {"phase": phase}}

    world.objects.modify(place, end, WriteOptions())
    delete(world.objects, world.place("pods", "one"), DeleteOptions())
    assert present(world, "pods", "one") is None


def test_a_chain_is_collected_from_the_top(world: Any) -> None:
    owner = world.make("configmaps", {"metadata": {"name": "n0"}})
    for depth in range(1, 4):
        metadata = owner["metadata"]
        reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": metadata["name"]}
        reference["uid"] = metadata["uid"]
        body = {"metadata": {"name": f"n{depth}", "ownerReferences": [reference]}}
        owner = world.make("configmaps", body)
    assert not world.collector.sweep()
    delete(world.objects, world.place("configmaps", "n0"), DeleteOptions())
    while world.collector.sweep():
        pass
    assert [present(world, "configmaps", f"n{depth}") for depth in range(4)] == [None] * 4


def test_a_reference_to_a_former_incarnation_holds_nothing(world: Any) -> None:
    first = world.make("configmaps", {"metadata": {"name": "owner"}})
    place = world.place("configmaps", "owner")
    delete(world.objects, place, DeleteOptions())
    world.make("configmaps", {"metadata": {"name": "owner"}})
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner"}
    reference["uid"] = first["metadata"]["uid"]
    world.make("configmaps", {"metadata": {"name": "late", "ownerReferences": [reference]}})
    world.collector.sweep()
    assert present(world, "configmaps", "late") is None
    assert present(world, "configmaps", "owner") is not None


def test_the_body_wins_over_the_query() -> None:
    options = delete_options({"gracePeriodSeconds": 1}, {"gracePeriodSeconds": "2"})
    assert options.grace_s == 1
    assert delete_options({}, {"propagationPolicy": "Orphan"}).propagation == "Orphan"
    assert delete_options({"orphanDependents": True}, {}).propagation == "Orphan"
    for body in ({"propagationPolicy": "Sideways"}, {"gracePeriodSeconds": "soon"}):
        with pytest.raises(StatusError):
            delete_options(body, {})
