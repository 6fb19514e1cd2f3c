"""Two candidates for one Lease: revisions decide every handover."""

from __future__ import annotations

import threading
from typing import Any

from kubernetes import client

from kubernetes_double.patience import PATIENCE_S


def take(clients: Any, lease: Any, name: str) -> bool:
    lease.spec.holder_identity = name
    lease.spec.lease_transitions = (lease.spec.lease_transitions or 0) + 1
    try:
        clients.leases.replace_namespaced_lease("leader", clients.namespace, lease)
    except client.ApiException as error:
        if error.status != 409:
            raise
        return False
    return True


def make(clients: Any) -> Any:
    body = {"metadata": {"name": "leader"}, "spec": {"leaseDurationSeconds": 15}}
    return clients.leases.create_namespaced_lease(clients.namespace, body)


def read(clients: Any) -> Any:
    return clients.leases.read_namespaced_lease("leader", clients.namespace)


def test_of_two_writers_of_the_same_lease_one_wins(clients: Any) -> None:
    make(clients)
    first, second = read(clients), read(clients)
    assert take(clients, first, "one")
    assert not take(clients, second, "two")
    assert read(clients).spec.holder_identity == "one"
    assert take(clients, read(clients), "two")


def test_a_race_has_one_winner_a_round(clients: Any) -> None:
    make(clients)
    for turn in range(5):
        barrier = threading.Barrier(4)
        won: list[str] = []

        def run(name: str, barrier: Any = barrier, won: Any = won) -> None:
            lease = read(clients)
            barrier.wait(PATIENCE_S)
            if take(clients, lease, name):
                won.append(name)

        racers = [threading.Thread(target=run, args=(f"{turn}-{i}",)) for i in range(4)]
        for one in racers:
            one.start()
        for one in racers:
            one.join(60)
        assert len(won) == 1
        after = read(clients)
        assert after.spec.holder_identity == won[0]
        assert after.spec.lease_transitions == turn + 1


def test_a_lease_needs_a_revision_to_change_hands(clients: Any, refusal: Any) -> None:
    lease = make(clients)
    lease.metadata.resource_version = None
    found = refusal(clients.leases.replace_namespaced_lease, "leader", clients.namespace, lease)
    assert (found.code, found.reason) == (422, "Invalid")


def test_times_keep_their_microseconds(clients: Any) -> None:
    make(clients)
    at = "2026-01-02T03:04:05.678901Z"
    body = {"spec": {"renewTime": at}}
    path = f"/apis/coordination.k8s.io/v1/namespaces/{clients.namespace}/leases/leader"
    answer = clients.send("PATCH", path, body, media="application/merge-patch+json")
    assert answer["spec"]["renewTime"] == at
