"""Takes a rollout worker whose engine gets weights wrong off its workload, and keeps its node."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from paceline.enums import WorkerKind
from paceline.errors import NotFoundError, PacelineError
from paceline.platform.telemetry.logs import Log
from paceline_controller.jobs.slots import (
    GIVE_UP_AFTER_LASTING,
    QUARANTINE_S,
    STEADY_S,
    refuses_weights,
)
from paceline_controller.runtimes.kubernetes import names, states
from paceline_controller.runtimes.kubernetes.connection import KubernetesClient
from paceline_controller.runtimes.kubernetes.events import Events, reference
from paceline_controller.runtimes.kubernetes.inventory import Inventory
from paceline_controller.runtimes.kubernetes.manifests import owner_reference
from paceline_controller.runtimes.kubernetes.resources import (
    DEPLOYMENTS,
    PODS,
    Object,
    annotations_of,
    deleting,
    labels_of,
    name_of,
    uid_of,
)

MAX_WORDS = 500  # in an annotation
log = Log("quarantine")


class Quarantine:
    """Isolates pods whose lives end again and again with weights that another worker serves.

    Such a pod loses the label by which its Deployment finds it, so that another one is made, and
    gets the one that pods of this workload keep away from: not on this node. It stays for
    `QUARANTINE_S`, so that nobody else is given its device meanwhile, and is then deleted. All
    that is known of it is in its metadata; only lives are counted here.
    """

    def __init__(
        self,
        connection: KubernetesClient,
        *,
        inventory: Inventory,
        events: Events,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._connection = connection
        self._inventory = inventory
        self._events = events
        self._now = now
        self._lives: dict[str, tuple[int, int]] = {}  # pod -> lives, of which the last refused

    async def look(self) -> None:
        """One round: isolate pods that are due, and delete those whose time is over."""
        pods = [pod for pod in self._inventory.pods.objects() if not deleting(pod)]
        self._lives = {uid: self._lives[uid] for uid in map(uid_of, pods) if uid in self._lives}
        for pod in pods:
            try:
                if names.QUARANTINED in labels_of(pod):
                    await self._release(pod)
                elif self._refuses_again(pod) and self._is_replaceable(pod):
                    await self._isolate(pod)
            except PacelineError as error:
                log.warning("cannot tend", pod=name_of(pod), error=error)

    def words(self) -> dict[str, str]:
        """The quarantined worker and its job, for people."""
        return {
            labels_of(pod).get(names.JOB, ""): _words_of(pod)
            for pod in self._inventory.pods.objects()
            if names.QUARANTINED in labels_of(pod) and names.REASON in annotations_of(pod)
        }

    def _refuses_again(self, pod: Object) -> bool:
        """Whether so many lives in a row have ended with a refusal, none of them long.

        Lives that nobody has looked at meanwhile count as the last one.
        """
        end = states.last_end(pod)
        if end is None or labels_of(pod).get(names.COMPONENT) != WorkerKind.ROLLOUT:
            return False
        known, refusals = self._lives.get(uid_of(pod), (0, 0))
        if end.lives != known:
            if not refuses_weights(end.words):
                refusals = 0
            elif end.lived_s >= STEADY_S:
                refusals = 1
            else:
                refusals += end.lives - known
            self._lives[uid_of(pod)] = (end.lives, refusals)
        return refusals >= GIVE_UP_AFTER_LASTING

    def _is_replaceable(self, pod: Object) -> bool:
        """Whether another rollout worker of its job is ready: else it may be the weights."""
        others = self._inventory.of_job(labels_of(pod).get(names.JOB, ""))
        return any(
            states.is_ready(other) and labels_of(other)[names.COMPONENT] == WorkerKind.ROLLOUT
            for other in others
            if uid_of(other) != uid_of(pod)
        )

    async def _isolate(self, pod: Object) -> None:
        workload = names.workload_of(pod)
        owner = self._inventory.rollout(workload)
        end = states.last_end(pod)
        if owner is None or end is None:
            return
        until = self._now() + timedelta(seconds=QUARANTINE_S)
        words = f"quarantined for {QUARANTINE_S / 60:g} min: {end.words}"
        metadata = {
            "uid": uid_of(pod),  # another pod of this name is left alone
            "labels": {names.WORKLOAD: None, names.QUARANTINED: names.object_name(workload)},
            "annotations": {
                names.WORKLOAD: None,
                names.UNTIL: until.isoformat(timespec="seconds"),
                names.REASON: words[:MAX_WORDS],
            },
            # In place of the ReplicaSet, so that it goes with its job.
            "ownerReferences": [owner_reference(owner, DEPLOYMENTS)],
        }
        await self._connection.patch(PODS, name_of(pod), {"metadata": metadata})
        node = pod["spec"].get("nodeName", "")
        log.error("quarantined", pod=name_of(pod), node=node, words=end.words)
        job_id = labels_of(pod).get(names.JOB, "")
        note = f"{name_of(pod)} on node {node} is {words}"
        for about in (None, reference({**pod, "apiVersion": PODS.api_version, "kind": PODS.kind})):
            self._events.record(job_id, "Quarantined", note, warning=True, about=about)

    async def _release(self, pod: Object) -> None:
        try:
            until = datetime.fromisoformat(annotations_of(pod).get(names.UNTIL, ""))
        except ValueError:  # somebody has changed it
            until = self._now()
        if self._now() < until:
            return
        try:
            await self._connection.delete(PODS, name_of(pod), uid=uid_of(pod))
        except NotFoundError:
            return
        log.info("quarantine is over", pod=name_of(pod))


def _words_of(pod: Object) -> str:
    return f"{name_of(pod)} is {annotations_of(pod)[names.REASON]}"
