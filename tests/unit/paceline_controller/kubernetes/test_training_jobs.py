"""Objects that are malformed, and objects whose jobs are deleted or lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import kubernetes
import pytest
import yaml

from kubernetes_double.api import ApiServer
from paceline.enums import JobState
from paceline.platform.transport.rpc import connect
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline_controller.cluster.training_job_status import FINALIZER
from paceline_controller.cluster.training_jobs import TrainingJobs
from paceline_controller.runtimes.kubernetes.connection import KubernetesClient, configuration
from paceline_controller.runtimes.kubernetes.events import Events
from paceline_controller.runtimes.kubernetes.resources import (
    TRAINING_JOBS,
    Kind,
    Object,
    name_of,
)
from paceline_controller.runtimes.kubernetes.watches import Cache
from paceline_harness.jobs import JobsInMemory, jobs_in_memory, serve_jobs
from paceline_harness.runtime import FakeClock

CHART = Path(__file__).resolve().parents[4] / "deploy" / "helm" / "paceline"
JOB = {
    "model": {"path": "m"},
    "tasks": {"environment": "arithmetic"},
    "reward": [{"kind": "exact"}],
    "stop": {"steps": 3},
}


def made(name: str, **fields: Any) -> Object:
    metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": "7"}
    return {"apiVersion": TRAINING_JOBS.api_version, "kind": TRAINING_JOBS.kind, **fields} | {
        "metadata": metadata
    }


class Server:
    """Objects that are there, and the changes that were asked for."""

    namespace = "default"

    def __init__(self, *objects: Object) -> None:
        self.objects = list(objects)
        self.changes: dict[str, Object] = {}

    async def list(
        self, kind: Kind, *, selector: str = "", fields: str = ""
    ) -> tuple[list[Object], str]:
        return self.objects, "8"

    async def watch(
        self, kind: Kind, *, selector: str = "", fields: str = "", version: str, watch_s: int = 60
    ) -> AsyncIterator[tuple[str, Object]]:
        yield "BOOKMARK", {"metadata": {"resourceVersion": version}}

    async def create(self, kind: Kind, body: Object) -> Object:
        return body

    async def delete(self, kind: Kind, name: str, *, uid: str = "") -> None:
        raise AssertionError(name)

    async def patch(
        self, kind: Kind, name: str, changes: Object, *, subresource: str = ""
    ) -> Object:
        self.changes[name] = changes
        (body,) = [each for each in self.objects if name_of(each) == name]
        changed = {**changes.get("metadata", {}), "resourceVersion": "9"}
        return {**body, "metadata": {**body["metadata"], **changed}}


async def test_a_malformed_object_does_not_block_others() -> None:
    strange = made("strange", status={"state": "hibernating", "jobId": "strange-1"})
    server = Server(strange, made("usual", spec={}))
    cache = Cache(server, TRAINING_JOBS, on_change=lambda: None)
    await cache.follow()
    controller = TrainingJobs(
        api=server,
        cache=cache,
        gateway=cast(Any, None),
        workers=cast(Any, None),
        events=Events(server, identity="c-0", regarding=lambda _: None),
    )
    await controller.once()
    assert server.changes["usual"]["metadata"]["finalizers"] == [FINALIZER]
    assert list(server.changes) == ["usual"]


@dataclass
class Installation:
    """A controller of objects of a real API server, for jobs that a test moves."""

    jobs: JobsInMemory
    objects: KubernetesClient
    cache: Cache
    controller: TrainingJobs
    clock: FakeClock

    async def apply(self, name: str) -> str:
        """Create an object; returns the id of its job."""
        body = {"apiVersion": TRAINING_JOBS.api_version, "kind": TRAINING_JOBS.kind}
        await self.objects.create(TRAINING_JOBS, {**body, "metadata": {"name": name}, "spec": JOB})
        await self.passes(6)
        return (await self.objects.get(TRAINING_JOBS, name))["status"]["jobId"]

    async def passes(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.pass_s(1)
            for body in (await self.objects.list(TRAINING_JOBS))[0]:
                self.cache.learn(body)
            for body in self.cache.objects():
                if name_of(body) not in await self.names():
                    self.cache.forget(body)
            await self.controller.once()

    async def names(self) -> list[str]:
        return [name_of(each) for each in (await self.objects.list(TRAINING_JOBS))[0]]

    async def status(self, name: str) -> Object:
        return (await self.objects.get(TRAINING_JOBS, name)).get("status") or {}


@pytest.fixture
async def installation(tmp_path: Path) -> AsyncIterator[Installation]:
    with ApiServer(folder=tmp_path / "api") as server:
        settings = await configuration(server.kubeconfig)
        crd = yaml.load((CHART / "files" / "trainingjob.yaml").read_text(), yaml.CSafeLoader)
        admin = kubernetes.config.new_client_from_config(str(server.kubeconfig))
        kubernetes.client.ApiextensionsV1Api(admin).create_custom_resource_definition(crd)
        objects, clock = KubernetesClient(settings, namespace="default"), FakeClock()
        jobs = jobs_in_memory()
        upstream, port = await serve_jobs(jobs)
        cache = Cache(Server(), TRAINING_JOBS, on_change=lambda: None)
        await cache.follow()
        async with connect(f"127.0.0.1:{port}") as channel:
            controller = TrainingJobs(
                api=objects,
                cache=cache,
                gateway=JobsStub(channel),
                workers=MemoryPods(),
                events=Events(objects, identity="c-0", regarding=lambda _: None),
                clock=clock,
            )
            yield Installation(jobs, objects, cache, controller, clock)
        await upstream.stop(None)
        await objects.close()


class MemoryPods:
    """No pods."""

    def waits_for(self, job_id: str) -> str:
        return ""

    def rollouts_of(self, job_id: str) -> int:
        return 0


async def test_an_object_goes_with_its_job_and_only_with_it(installation: Installation) -> None:
    """As with `ttlSecondsAfterFinished`: also when the job has ended long before."""
    over, stays = await installation.apply("over"), await installation.apply("stays")
    for job_id in (over, stays):
        path = (JobState.STARTING, JobState.RUNNING, JobState.SUCCEEDED)
        await installation.jobs.move(job_id, *path)
    await installation.passes(100)
    assert await installation.names() == ["over", "stays"]
    installation.jobs.delete(over)
    await installation.passes(60)
    assert await installation.names() == ["stays"]
    assert len(installation.jobs.jobs) == 1  # nothing was submitted again


async def test_a_submission_that_is_pending_is_repeated_until_there_is_one_job(
    installation: Installation,
) -> None:
    installation.jobs.pending = 2
    body = {"apiVersion": TRAINING_JOBS.api_version, "kind": TRAINING_JOBS.kind}
    created = {**body, "metadata": {"name": "fork"}, "spec": JOB}
    await installation.objects.create(TRAINING_JOBS, created)
    await installation.passes(30)
    assert (await installation.status("fork"))["jobId"] in installation.jobs.jobs
    assert (installation.jobs.pending, len(installation.jobs.jobs)) == (0, 1)


async def test_a_fork_of_a_job_that_is_unknown_has_failed(installation: Installation) -> None:
    body = {"apiVersion": TRAINING_JOBS.api_version, "kind": TRAINING_JOBS.kind}
    spec = JOB | {"fork": {"job": "gone-123456", "step": 2}}
    created = {**body, "metadata": {"name": "fork"}, "spec": spec}
    await installation.objects.create(TRAINING_JOBS, created)
    await installation.passes(30)
    status = await installation.status("fork")
    assert (status["state"], installation.jobs.jobs) == ("failed", {})
    assert "gone-123456" in status["reason"]
    await installation.objects.delete(TRAINING_JOBS, "fork")
    assert await installation.names() == []  # nothing holds it


async def test_an_object_goes_with_a_job_that_is_deleted_while_it_runs(
    installation: Installation,
) -> None:
    job_id = await installation.apply("runs")
    path = (JobState.STARTING, JobState.RUNNING, JobState.CANCELLING)
    await installation.jobs.move(job_id, *path)
    await installation.passes(4)
    installation.jobs.delete(job_id)
    await installation.passes(10)
    assert await installation.names() == []
    assert not installation.jobs.jobs


async def test_a_job_that_is_lost_is_submitted_again_and_one_that_is_deleted_is_not(
    installation: Installation,
) -> None:
    """A controller that was away has seen neither the end of the job nor its deletion."""
    first, gone = await installation.apply("lost"), await installation.apply("gone")
    for job_id in (first, gone):
        await installation.jobs.move(job_id, JobState.STARTING, JobState.RUNNING)
    await installation.passes(4)
    installation.jobs.delete(gone)
    installation.jobs.lose(first)
    await installation.passes(10)
    assert await installation.names() == ["lost"]
    status = await installation.status("lost")
    assert (status["state"], [*installation.jobs.jobs]) == ("queued", [status["jobId"]])
