"""Finalizers, preconditions, and deletion of dependents."""

from __future__ import annotations

from typing import Any

import pytest

FINALIZER = "double.example/contract"


def owned(clients: Any, name: str, owner: Any, kind: tuple[str, str] = ("v1", "ConfigMap")) -> Any:
    reference = {
        "apiVersion": kind[0],
        "kind": kind[1],
        "name": owner.metadata.name,
        "uid": owner.metadata.uid,
        "blockOwnerDeletion": True,
    }
    return clients.settings(name, metadata={"ownerReferences": [reference]})


def read(clients: Any, name: str) -> Any:
    return clients.core.read_namespaced_config_map(name, clients.namespace)


def delete(clients: Any, name: str, **body: Any) -> Any:
    return clients.core.delete_namespaced_config_map(name, clients.namespace, body=body)


def test_a_finalizer_holds_an_object(clients: Any, refusal: Any) -> None:
    clients.settings("one", metadata={"finalizers": [FINALIZER]})
    delete(clients, "one")
    held = read(clients, "one")
    assert held.metadata.deletion_timestamp
    delete(clients, "one")
    more = {"metadata": {"finalizers": [FINALIZER, "double.example/late"]}}
    patch = clients.core.patch_namespaced_config_map
    found = refusal(patch, "one", clients.namespace, more)
    assert (found.code, found.fields) == (422, 2 * ["metadata.finalizers"])
    assert found.message.count("no new finalizers can be added") == 1
    assert 'found new finalizers []string{"double.example/late"}' in found.message
    patch("one", clients.namespace, {"metadata": {"finalizers": None}})
    assert refusal(read, clients, "one").code == 404


def test_preconditions_guard_a_deletion(clients: Any, refusal: Any) -> None:
    made = clients.settings("one")
    found = refusal(delete, clients, "one", preconditions={"uid": "another"})
    assert (found.code, found.reason) == (409, "Conflict")
    begin = (
        'Operation cannot be fulfilled on ConfigMap "one": the UID in the precondition (another)'
    )
    assert found.message.startswith(begin)
    version = {"resourceVersion": made.metadata.resource_version}
    clients.core.patch_namespaced_config_map("one", clients.namespace, {"data": {"a": "1"}})
    assert refusal(delete, clients, "one", preconditions=version).code == 409
    delete(clients, "one", preconditions={"uid": made.metadata.uid})
    assert refusal(read, clients, "one").code == 404


@pytest.mark.parametrize("policy", ["Background", "Foreground"])
def test_dependents_follow_their_owner(clients: Any, until: Any, gone: Any, policy: str) -> None:
    owner = clients.settings("owner")
    middle = owned(clients, "middle", owner)
    owned(clients, "leaf", middle)
    delete(clients, "owner", propagationPolicy=policy)
    for name in ("leaf", "middle", "owner"):
        until(lambda name=name: gone(clients.core.read_namespaced_config_map, name))


def test_in_the_foreground_the_owner_goes_last(clients: Any, until: Any, gone: Any) -> None:
    owner = clients.settings("owner")
    reference = [{"apiVersion": "v1", "kind": "ConfigMap", "name": "owner"}]
    reference[0]["uid"] = owner.metadata.uid
    held = {"ownerReferences": [{**reference[0], "blockOwnerDeletion": True}]}
    clients.settings("held", metadata={**held, "finalizers": [FINALIZER]})
    delete(clients, "owner", propagationPolicy="Foreground")
    until(lambda: read(clients, "held").metadata.deletion_timestamp)
    waiting = read(clients, "owner")
    assert waiting.metadata.deletion_timestamp
    assert waiting.metadata.finalizers == ["foregroundDeletion"]
    patch = {"metadata": {"finalizers": None}}
    clients.core.patch_namespaced_config_map("held", clients.namespace, patch)
    until(lambda: gone(clients.core.read_namespaced_config_map, "owner"))


def test_orphans_lose_their_owner_and_stay(clients: Any, until: Any, gone: Any) -> None:
    owner = clients.settings("owner")
    owned(clients, "dependent", owner)
    delete(clients, "owner", propagationPolicy="Orphan")
    until(lambda: gone(clients.core.read_namespaced_config_map, "owner"))
    assert not read(clients, "dependent").metadata.owner_references


def test_one_owner_is_enough(clients: Any, until: Any, gone: Any) -> None:
    first, second = clients.settings("first"), clients.settings("second")
    references = [
        {"apiVersion": "v1", "kind": "ConfigMap", "name": o.metadata.name, "uid": o.metadata.uid}
        for o in (first, second)
    ]
    clients.settings("dependent", metadata={"ownerReferences": references})
    owned(clients, "control", first)
    delete(clients, "first", propagationPolicy="Background")
    until(lambda: gone(clients.core.read_namespaced_config_map, "control"))
    assert read(clients, "dependent").metadata.uid
    delete(clients, "second", propagationPolicy="Background")
    until(lambda: gone(clients.core.read_namespaced_config_map, "dependent"))


def test_an_owner_that_never_was_holds_nothing(clients: Any, until: Any, gone: Any) -> None:
    class Ghost:
        class metadata:
            name, uid = "ghost", "00000000-0000-0000-0000-000000000000"

    owned(clients, "dependent", Ghost)
    until(lambda: gone(clients.core.read_namespaced_config_map, "dependent"))


def test_jobs_orphan_their_dependents_by_default(clients: Any, until: Any, gone: Any) -> None:
    template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "n:1"}]}}
    for name, options in (("kept", {}), ("cleaned", {"propagation_policy": "Background"})):
        body = {"metadata": {"name": name}, "spec": {"suspend": True, "template": template}}
        job = clients.batch.create_namespaced_job(clients.namespace, body)
        owned(clients, f"{name}-dependent", job, ("batch/v1", "Job"))
        clients.batch.delete_namespaced_job(name, clients.namespace, **options)
        until(lambda name=name: gone(clients.batch.read_namespaced_job, name))
    until(lambda: gone(clients.core.read_namespaced_config_map, "cleaned-dependent"))
    assert not read(clients, "kept-dependent").metadata.owner_references


def test_a_namespace_takes_everything_with_it(clients: Any, until: Any, refusal: Any) -> None:
    made = clients.core.create_namespace({"metadata": {"generateName": "double-contract-"}})
    name = made.metadata.name
    held = {"metadata": {"name": "held", "finalizers": [FINALIZER]}}
    clients.core.create_namespaced_config_map(name, held)
    clients.core.delete_namespace(name)
    until(lambda: clients.core.read_namespace(name).status.phase == "Terminating")
    found = refusal(clients.core.create_namespaced_config_map, name, {"metadata": {"name": "late"}})
    assert (found.code, found.reason) == (403, "Forbidden")
    assert "because it is being terminated" in found.message
    patch = {"metadata": {"finalizers": None}}
    clients.core.patch_namespaced_config_map("held", name, patch)
    remaining = clients.core.list_namespace
    until(lambda: name not in {one.metadata.name for one in remaining().items})
