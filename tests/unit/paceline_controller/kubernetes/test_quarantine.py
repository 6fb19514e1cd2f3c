"""Which lives of a pod count towards its quarantine, and when that ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from paceline.config.sections.kubernetes import KubernetesOptions
from paceline.enums import WorkerKind
from paceline_controller.jobs.plan import Wanted
from paceline_controller.jobs.slots import QUARANTINE_S, STEADY_S
from paceline_controller.runtimes.kubernetes import names
from paceline_controller.runtimes.kubernetes.events import Events
from paceline_controller.runtimes.kubernetes.inventory import Inventory
from paceline_controller.runtimes.kubernetes.manifests import CONTAINER, ManifestContext, build
from paceline_controller.runtimes.kubernetes.quarantine import Quarantine
from paceline_controller.runtimes.kubernetes.resources import DEPLOYMENTS, PODS, Kind, Object

WANTED = Wanted("rollout-j1", WorkerKind.ROLLOUT, job_id="j1", replicas=2)
REFUSED = "RefusedWeightsError: version 3, which another worker serves"
KILLED = "OOMKilled"
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


class Server:
    """The objects of a job with two rollout pods, and what was asked for."""

    namespace = "default"

    def __init__(self) -> None:
        template = {"metadata": {"labels": {}}, "spec": {"containers": [{"name": CONTAINER}]}}
        context = ManifestContext("rel")
        (deployment,) = build(WANTED, template, incarnation=0, context=context)
        deployment["metadata"] |= {"uid": "u-d", "resourceVersion": "7"}
        pods = [pod(name) for name in ("a", "b")]
        self.objects: dict[Kind, list[Object]] = {DEPLOYMENTS: [deployment], PODS: pods}
        self.patched: list[Object] = []
        self.deleted: list[tuple[str, str]] = []

    async def list(
        self, kind: Kind, *, selector: str = "", fields: str = ""
    ) -> tuple[list[Object], str]:
        return self.objects.get(kind, []), "8"

    async def watch(
        self, kind: Kind, *, selector: str = "", fields: str = "", version: str, watch_s: int = 60
    ) -> AsyncIterator[tuple[str, Object]]:
        yield "BOOKMARK", {"metadata": {"resourceVersion": version}}

    async def patch(
        self, kind: Kind, name: str, changes: Object, *, subresource: str = ""
    ) -> Object:
        self.patched.append(changes)
        return changes

    async def delete(self, kind: Kind, name: str, *, uid: str = "") -> None:
        self.deleted.append((name, uid))


def pod(name: str, *, ready: bool = True, **metadata: Any) -> Object:
    about = {"name": name, "uid": f"u-{name}", "resourceVersion": "7"}
    about |= {"labels": names.labels(WANTED, release="rel"), "annotations": {}, **metadata}
    conditions = [{"type": "Ready", "status": "True"}] if ready else []
    status: Object = {"phase": "Running", "conditions": conditions, "containerStatuses": []}
    return {"metadata": about, "spec": {"nodeName": "node-1"}, "status": status}


def restarted(times: int, words: str, *, lived_s: float = 60.0) -> Object:
    ended = BEGAN + timedelta(seconds=lived_s)
    over = {"message": words, "startedAt": BEGAN.isoformat(), "finishedAt": ended.isoformat()}
    status = {"name": CONTAINER, "restartCount": times, "lastState": {"terminated": over}}
    found = pod("a", ready=False)
    found["status"]["containerStatuses"] = [status]
    return found


class World:
    def __init__(self, inventory: Inventory, server: Server) -> None:
        self.inventory, self.server, self.now = inventory, server, BEGAN
        events = Events(cast(Any, server), identity="c-0", regarding=lambda _: None)
        self.quarantine = Quarantine(
            cast(Any, server), inventory=inventory, events=events, now=lambda: self.now
        )

    async def see(self, *bodies: Object) -> None:
        for body in bodies:
            self.inventory.pods.learn(body)
        await self.quarantine.look()


@pytest.fixture
async def world() -> World:
    server = Server()
    options = KubernetesOptions(release="rel")
    inventory = Inventory(cast(Any, server), options, on_change=lambda: None)
    for cache in (inventory.deployments, inventory.pods):
        await cache.follow()
    return World(inventory, server)


async def test_three_lives_in_a_row_isolate_a_pod(world: World) -> None:
    for times in (1, 2):
        await world.see(restarted(times, REFUSED))
        await world.quarantine.look()  # the same life again
        assert not world.server.patched
    await world.see(restarted(3, REFUSED))
    (changes,) = world.server.patched
    metadata = changes["metadata"]
    assert metadata["uid"] == "u-a"
    assert metadata["labels"] == {names.WORKLOAD: None, names.QUARANTINED: "rollout-j1"}
    (owner,) = metadata["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("Deployment", "u-d")
    assert "controller" not in owner


async def test_a_new_controller_counts_what_it_has_not_seen(world: World) -> None:
    await world.see(restarted(3, REFUSED))
    assert len(world.server.patched) == 1


@pytest.mark.parametrize(
    "between",
    [restarted(3, KILLED), restarted(3, REFUSED, lived_s=STEADY_S)],
    ids=["another reason", "a long life"],
)
async def test_other_ends_begin_the_count_anew(world: World, between: Object) -> None:
    for found in (restarted(1, REFUSED), restarted(2, REFUSED), between, restarted(4, REFUSED)):
        await world.see(found)
    assert not world.server.patched


async def test_the_last_worker_of_a_job_is_left_where_it_is(world: World) -> None:
    """It may be the weights; so it fails as everything does that crashes again and again."""
    await world.see(pod("b", ready=False), restarted(3, REFUSED))
    assert not world.server.patched
    await world.see(pod("b"))
    assert len(world.server.patched) == 1


async def test_a_quarantine_ends_with_the_pod(world: World) -> None:
    until = BEGAN + timedelta(seconds=QUARANTINE_S)
    marked: dict[str, Any] = {
        "labels": {names.QUARANTINED: "rollout-j1", names.JOB: "j1"},
        "annotations": {names.UNTIL: until.isoformat(), names.REASON: "quarantined for 10 min: x"},
    }
    await world.see(pod("a", **marked))
    assert world.quarantine.words() == {"j1": "a is quarantined for 10 min: x"}
    assert not world.server.deleted
    world.now = until
    await world.quarantine.look()
    assert world.server.deleted == [("a", "u-a")]


async def test_a_quarantine_whose_end_cannot_be_read_is_over(world: World) -> None:
    await world.see(pod("a", labels={names.QUARANTINED: "x"}, annotations={names.UNTIL: "soon"}))
    assert world.server.deleted == [("a", "u-a")]
