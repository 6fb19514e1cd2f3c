"""What the runtime remembers and goes on with, in front of an API that says no now and then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from paceline.config.sections.kubernetes import KubernetesOptions
from paceline.enums import WorkerKind
from paceline.errors import InvalidError, PacelineError
from paceline_controller.jobs.plan import Wanted
from paceline_controller.runtimes.kubernetes.events import Events
from paceline_controller.runtimes.kubernetes.inventory import Inventory
from paceline_controller.runtimes.kubernetes.manifests import CONTAINER, ManifestContext, build
from paceline_controller.runtimes.kubernetes.names import labels
from paceline_controller.runtimes.kubernetes.resources import (
    DEPLOYMENTS,
    PODS,
    SECRETS,
    Kind,
    Object,
)
from paceline_controller.runtimes.kubernetes.runtime import LOG_S, KubernetesRuntime
from paceline_harness.patience import PATIENCE_S
from paceline_harness.runtime import FakeClock, MadeUpCredentials

TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {}},
    "spec": {"containers": [{"name": CONTAINER, "image": "worker:1"}]},
}
NEWER: dict[str, Any] = {
    "metadata": {"labels": {}},
    "spec": {"containers": [{"name": CONTAINER, "image": "worker:2"}]},
}


def rollout(job_id: str, pool: str = "default") -> Wanted:
    name = f"rollout-{job_id}" if pool == "default" else f"rollout-{job_id}-{pool}"
    return Wanted(name, WorkerKind.ROLLOUT, job_id=job_id, pool=pool, replicas=1)


class Server:
    """Objects by kind, what was applied but Secrets, and the names that it does not take."""

    namespace = "default"

    def __init__(self) -> None:
        self.objects: dict[Kind, list[Object]] = {}
        self.deleted: dict[Kind, list[Object]] = {}
        self.refuses: dict[str, PacelineError] = {}
        self.applied: list[str] = []
        self.owners: dict[str, list[Object]] = {}
        self.log_s = 0.0

    async def list(
        self, kind: Kind, *, selector: str = "", fields: str = ""
    ) -> tuple[list[Object], str]:
        return self.objects.get(kind, []), "8"

    async def watch(
        self, kind: Kind, *, selector: str = "", fields: str = "", version: str, watch_s: int = 60
    ) -> AsyncIterator[tuple[str, Object]]:
        for body in self.deleted.pop(kind, []):
            yield "DELETED", body
        yield "BOOKMARK", {"metadata": {"resourceVersion": version}}

    async def create(self, kind: Kind, body: Object) -> Object:
        return body

    async def apply(self, body: Object) -> Object:
        name = body["metadata"]["name"]
        if name in self.refuses:
            raise self.refuses[name]
        if body["kind"] != SECRETS.kind:
            self.applied.append(name)
        self.owners[name] = body["metadata"].get("ownerReferences", [])
        return {
            **body,
            "metadata": {"uid": f"uid-{name}", "resourceVersion": "9"} | body["metadata"],
        }

    async def delete(self, kind: Kind, name: str, *, uid: str = "") -> None:
        self.owners.pop(name, None)

    async def log(self, kind: Kind, name: str, *, container: str, lines: int) -> str:
        await asyncio.sleep(self.log_s)
        return "the end"

    def add_rollout(self, wanted: Wanted) -> None:
        context = ManifestContext("rel", owner=None, ranks_per_pod=8, jobset=False)
        (body,) = build(wanted, TEMPLATE, incarnation=0, context=context)
        body["metadata"] |= {"uid": f"uid-{wanted.name}", "resourceVersion": "7"}
        self.objects.setdefault(DEPLOYMENTS, []).append(body)

    def add_pending_pod(self, wanted: Wanted, gates: list[Object]) -> None:
        blocked = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
        metadata = {"name": f"{wanted.name}-0", "uid": "u-p", "resourceVersion": "7"}
        metadata |= {"labels": labels(wanted, release="rel")}
        status = {"phase": "Pending", "conditions": [blocked]}
        body = {"metadata": metadata, "spec": {"schedulingGates": gates}, "status": status}
        self.objects.setdefault(PODS, []).append(body)

    def add_dead_pod(self, wanted: Wanted) -> None:
        over = {"exitCode": 1, "reason": "Error", "finishedAt": "2026-01-01T00:00:00Z"}
        status = {"name": CONTAINER, "state": {"terminated": over}}
        metadata = {"name": f"{wanted.name}-0", "uid": "u-p", "resourceVersion": "7"}
        metadata |= {"labels": labels(wanted, release="rel")}
        body = {"metadata": metadata, "status": {"phase": "Failed", "containerStatuses": [status]}}
        self.objects.setdefault(PODS, []).append(body)


async def runtime_of(
    server: Server,
    folder: Path,
    log_s: float = LOG_S,
    on_inventory: Callable[[Inventory], object] = id,
    clock: Callable[[], float] = time.monotonic,
) -> KubernetesRuntime:
    options = KubernetesOptions(release="rel", templates=folder)
    inventory = Inventory(cast(Any, server), options, on_change=lambda: None)
    on_inventory(inventory)
    for cache in (inventory.deployments, inventory.trainers, inventory.pods, inventory.refusals):
        await cache.follow()
    events = Events(cast(Any, server), identity="c-0", regarding=lambda _: None)
    return KubernetesRuntime(
        cast(Any, server),
        options,
        inventory=inventory,
        events=events,
        credentials=MadeUpCredentials(),
        clock=clock,
        log_s=log_s,
    )


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    for pool in ("default", "spot"):
        (tmp_path / f"rollout-{pool}.yaml").write_text(yaml.safe_dump(NEWER))
    return tmp_path


async def test_a_refusal_is_a_reason_only_as_long_as_the_workload_is_wanted(
    templates: Path,
) -> None:
    server = Server()
    server.refuses["rollout-a-1-spot"] = InvalidError("no such runtime class")
    runtime = await runtime_of(server, templates)
    both = [rollout("a-1"), rollout("a-1", "spot")]
    for wanted in runtime.units(both):
        try:
            await runtime.start(wanted, incarnation=0)
        except InvalidError:
            continue
    assert runtime.waits_for("a-1") == "no such runtime class"
    runtime.units(both)
    assert runtime.waits_for("a-1") == "no such runtime class"
    runtime.units(both[:1])
    assert runtime.waits_for("a-1") == ""
    assert await runtime.last_words("rollout-a-1-spot") == "it left no words"


@pytest.mark.parametrize("broken", ["refused", "missing"])
async def test_a_template_that_is_not_taken_stops_the_roll_out_of_no_other(
    templates: Path, broken: str
) -> None:
    server = Server()
    for wanted in (rollout("a-1", "spot"), rollout("b-1"), rollout("c-1")):
        server.add_rollout(wanted)
    if broken == "refused":
        server.refuses["rollout-a-1-spot"] = InvalidError("spec.containers: invalid")
    else:
        (templates / "rollout-spot.yaml").unlink()
    runtime = await runtime_of(server, templates)
    await runtime.maintain_once()
    assert server.applied == ["rollout-b-1", "rollout-c-1"]
    # Those of an earlier release get their credentials with the new pods.
    assert "rollout-b-1-credential" in server.owners


async def test_last_words_do_not_wait_long_for_a_log(templates: Path) -> None:
    server = Server()
    server.add_dead_pod(rollout("a-1"))
    runtime = await runtime_of(server, templates, log_s=0.5)
    assert "the end" in await runtime.last_words("rollout-a-1")
    server.log_s = 60.0
    words = await asyncio.wait_for(runtime.last_words("rollout-a-1"), PATIENCE_S)
    assert "ended with 1 (Error)" in words
    assert "(no log within 0.5 s)" in words


async def test_what_is_applied_while_the_release_is_uninstalled_still_goes_with_it(
    templates: Path,
) -> None:
    server, inventories = Server(), list[Inventory]()
    controller = {"name": "paceline-controller", "uid": "u-c", "resourceVersion": "7", "labels": {}}
    server.objects[DEPLOYMENTS] = [{"kind": DEPLOYMENTS.kind, "metadata": controller}]
    runtime = await runtime_of(server, templates, on_inventory=inventories.append)
    await runtime.start(rollout("a-1"), incarnation=0)
    server.deleted[DEPLOYMENTS] = [{"metadata": {**controller, "resourceVersion": "10"}}]
    await inventories[0].deployments.follow()
    await runtime.start(rollout("b-1"), incarnation=0)
    assert [each["uid"] for each in server.owners["rollout-a-1"]] == ["u-c"]
    assert server.owners["rollout-b-1"] == server.owners["rollout-a-1"]
    assert server.owners["rollout-a-1-credential"] == server.owners["rollout-a-1"]


@pytest.mark.parametrize(
    ("gate", "alive"), [("kueue.x-k8s.io/admission", True), ("example.com/licence", False)]
)
async def test_waiting_for_quota_may_take_longer_than_waiting_for_machines(
    gate: str, alive: bool, templates: Path
) -> None:
    server, clock = Server(), FakeClock()
    wanted = replace(rollout("a-1"), queue="gpus")
    server.add_rollout(wanted)
    server.add_pending_pod(wanted, [{"name": gate}])
    runtime = await runtime_of(server, templates, clock=clock)
    await runtime.list()
    clock.pass_s(100_000)
    (seen,) = await runtime.list()
    assert seen.alive is alive
    assert ("waits in Kueue's queue 'gpus' for quota" in runtime.waits_for("a-1")) is alive
