"""Cache of all objects of one installation that the cluster has reported."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

from paceline.config.sections.kubernetes import KubernetesOptions
from paceline.errors import UnavailableError
from paceline_controller.runtimes.kubernetes.manifests import GROUP
from paceline_controller.runtimes.kubernetes.names import (
    INSTANCE,
    JOB,
    WORKLOAD,
    object_name,
    selector,
    workload_of,
)
from paceline_controller.runtimes.kubernetes.resources import (
    DEPLOYMENTS,
    EVENTS,
    JOBS,
    JOBSETS,
    PODS,
    Kind,
    Object,
    labels_of,
    name_of,
)
from paceline_controller.runtimes.kubernetes.watches import Cache, ObjectSource


class Inventory:
    """Caches of Deployments, trainer Jobs (or JobSets) and pods, and who belongs to whom.

    Also of the events in which the cluster says that it makes no pods: a Job has no other word
    for it.
    """

    def __init__(
        self, source: ObjectSource, options: KubernetesOptions, *, on_change: Callable[[], None]
    ) -> None:
        self.trainer_kind: Kind = JOBSETS if options.jobset else JOBS
        whole = f"{INSTANCE}={options.release}"
        ours = selector(release=options.release)
        self.deployments = Cache(source, DEPLOYMENTS, selector=whole, on_change=on_change)
        self.trainers = Cache(source, self.trainer_kind, selector=ours, on_change=on_change)
        self.pods = Cache(source, PODS, selector=whole, on_change=on_change)
        self.refusals = Cache(source, EVENTS, fields="reason=FailedCreate", on_change=on_change)
        self._pools = options.pools

    async def run(self) -> None:
        """Keep everything current, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for cache in (self.deployments, self.trainers, self.pods, self.refusals):
                tasks.create_task(cache.run())

    def pools(self) -> dict[str, Object]:
        """The chart's Deployments of shared pools, by workload."""
        by_name = {name_of(body): body for body in self.deployments.objects()}
        return {
            workload: by_name[name] for workload, name in self._pools.items() if name in by_name
        }

    def rollouts(self) -> list[Object]:
        """The Deployments that the controller has made."""
        return [body for body in self.deployments.objects() if workload_of(body)]

    def rollout(self, workload: str) -> Object | None:
        """The Deployment of a rollout workload."""
        deployment = self.deployments.find(object_name(workload))
        return deployment if deployment and workload_of(deployment) == workload else None

    def trainer_jobs(self) -> dict[str, list[Object]]:
        """The Jobs (or JobSets) of all incarnations, by workload."""
        by_workload: dict[str, list[Object]] = defaultdict(list)
        for body in self.trainers.objects():
            if workload := workload_of(body):
                by_workload[workload].append(body)
        return by_workload

    def pods_by_workload(self) -> dict[str, list[Object]]:
        """The pods of what the controller has made."""
        by_workload: dict[str, list[Object]] = defaultdict(list)
        for pod in self.pods.objects():
            if workload := workload_of(pod):
                by_workload[workload].append(pod)
        return by_workload

    def pods_of(self, body: Object) -> list[Object]:
        """The pods that a Deployment selects."""
        wanted = body["spec"]["selector"].get("matchLabels", {}).items()
        return [pod for pod in self.pods.objects() if wanted <= labels_of(pod).items()]

    def of_job(self, job_id: str) -> list[Object]:
        """The pods of a job."""
        return [
            pod
            for pod in self.pods.objects()
            if labels_of(pod).get(JOB) == job_id and WORKLOAD in labels_of(pod)
        ]

    def deployments_of(self, job_id: str) -> list[Object]:
        """The rollout workloads of a job."""
        return [body for body in self.rollouts() if labels_of(body).get(JOB) == job_id]

    def refusal_of(self, trainer: Object) -> str:
        """The cluster's last refusal to make a pod of a Job or JobSet; empty: none."""
        wanted = {name_of(trainer), f"{name_of(trainer)}-{GROUP}-0"}
        try:
            events = self.refusals.objects()
        except UnavailableError:  # a word less for people, nothing else
            return ""
        about = [
            event
            for event in events
            if event.get("regarding", {}).get("kind") == JOBS.kind
            and event["regarding"].get("name") in wanted
        ]
        newest = max(about, key=lambda e: int(e["metadata"]["resourceVersion"]), default=None)
        return f"FailedCreate: {newest.get('note', '')}" if newest else ""
