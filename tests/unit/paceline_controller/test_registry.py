import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import aio

from paceline.config import parse_job
from paceline.enums import JobState
from paceline.errors import (
    NotFoundError,
    PacelineError,
    PermissionDeniedError,
    TransitionError,
    UnavailableError,
)
from paceline.platform import wire
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.transport.rpc import ErrorInterceptor, connect
from paceline.v1 import experience_pb2, jobs_pb2, types_pb2
from paceline.v1.experience_pb2_grpc import (
    ExperienceServicer,
    ExperienceStub,
    add_ExperienceServicer_to_server,
)
from paceline.v1.jobs_pb2_grpc import JobsServicer, JobsStub, add_JobsServicer_to_server
from paceline.v1.tenants_pb2_grpc import TenantsStub
from paceline_controller.registry import GrpcJobRegistry

SPEC = {
    "name": "a",
    "model": {"path": "models/tiny"},
    "tasks": {"environment": "arithmetic"},
    "reward": ["exact"],
    "rollout": {"replicas": 3},
}


class Experience(ExperienceServicer, JobsServicer):
    """Two live jobs on two pages; says no to one transition."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.files: list[str] = []  # of jobs that were asked for
        self.trouble: dict[str, PacelineError] = {}  # by job

    async def ListJobs(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: jobs_pb2.ListJobsRequest, context: object
    ) -> jobs_pb2.ListJobsReply:
        self.asked.append(list(request.state))
        page = int(request.page_token or 1)
        status = types_pb2.JobStatus(
            job_id=f"a-{page}", state=types_pb2.JOB_STATE_RUNNING, step=page
        )
        job = types_pb2.Job(status=status)
        return jobs_pb2.ListJobsReply(jobs=[job], next_page_token="2" if page == 1 else "")

    async def GetJob(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: jobs_pb2.GetJobRequest, context: object
    ) -> types_pb2.Job:
        self.files.append(request.job_id)
        if request.job_id in self.trouble:
            raise self.trouble[request.job_id]
        status = types_pb2.JobStatus(job_id=request.job_id, state=types_pb2.JOB_STATE_RUNNING)
        return types_pb2.Job(status=status, spec_json=json.dumps(SPEC))

    async def GrantIncarnation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: experience_pb2.GrantIncarnationRequest, context: object
    ) -> experience_pb2.GrantIncarnationReply:
        return experience_pb2.GrantIncarnationReply(incarnation=7)

    async def ReportFailure(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: experience_pb2.ReportFailureRequest, context: object
    ) -> experience_pb2.ReportFailureReply:
        self.asked.append((request.job_id, request.incarnation, request.reason))
        return experience_pb2.ReportFailureReply(failures=3, reason="before")

    async def SetJobState(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: experience_pb2.SetJobStateRequest, context: object
    ) -> types_pb2.Job:
        if request.state == types_pb2.JOB_STATE_QUEUED:
            raise TransitionError("job: running -> queued is not allowed")
        self.asked.append((request.job_id, request.state, request.reason))
        return types_pb2.Job()


@pytest.fixture
async def experience() -> AsyncIterator[tuple[Experience, GrpcJobRegistry]]:
    servicer = Experience()  # pyright: ignore[reportAbstractUsage]
    server = aio.server(interceptors=[ErrorInterceptor(metrics=Metrics())])
    add_ExperienceServicer_to_server(servicer, server)
    add_JobsServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = connect(f"127.0.0.1:{port}")
    yield (
        servicer,
        GrpcJobRegistry(
            jobs=JobsStub(channel),
            experience=ExperienceStub(channel),
            tenants=TenantsStub(channel),
        ),
    )
    await channel.close()
    await server.stop(None)


async def test_live_jobs_over_all_pages(experience: tuple[Experience, GrpcJobRegistry]) -> None:
    servicer, ledger = experience
    found = await ledger.live_jobs()
    assert [(job.job_id, job.state, job.step) for job in found] == [
        ("a-1", JobState.RUNNING, 1),
        ("a-2", JobState.RUNNING, 2),
    ]
    assert found[0].spec == parse_job(SPEC)
    assert set(servicer.asked[0]) == {wire.number_of(s) for s in JobState if not s.terminal}
    assert (await ledger.live_jobs())[0].spec is found[0].spec


async def test_job_files_that_have_come_are_kept_when_another_does_not(
    experience: tuple[Experience, GrpcJobRegistry],
) -> None:
    servicer, ledger = experience
    servicer.trouble["a-2"] = PermissionDeniedError("not now")
    with pytest.raises(PermissionDeniedError):
        await ledger.live_jobs()
    servicer.trouble.clear()
    assert len(await ledger.live_jobs()) == 2
    assert servicer.files == ["a-1", "a-2", "a-2"]


async def test_a_job_that_has_gone_since_it_was_listed_is_left_out(
    experience: tuple[Experience, GrpcJobRegistry],
) -> None:
    servicer, ledger = experience
    servicer.trouble["a-1"] = NotFoundError("job 'a-1' is not known")
    assert [job.job_id for job in await ledger.live_jobs()] == ["a-2"]


async def test_failures_are_reported(experience: tuple[Experience, GrpcJobRegistry]) -> None:
    servicer, ledger = experience
    assert await ledger.report_failure("a-1", "boom") == (3, "before")
    assert servicer.asked == [("a-1", 0, "boom")]


async def test_grant_and_set_state(experience: tuple[Experience, GrpcJobRegistry]) -> None:
    servicer, ledger = experience
    assert await ledger.grant_incarnation("a-1") == 7
    await ledger.set_state("a-1", JobState.FAILED, reason="boom")
    assert servicer.asked == [("a-1", types_pb2.JOB_STATE_FAILED, "boom")]
    with pytest.raises(TransitionError, match="running -> queued"):
        await ledger.set_state("a-1", JobState.QUEUED)


async def test_experience_is_away() -> None:
    channel = connect("127.0.0.1:1")
    ledger = GrpcJobRegistry(
        jobs=JobsStub(channel),
        experience=ExperienceStub(channel),
        tenants=TenantsStub(channel),
    )
    with pytest.raises(UnavailableError):
        await ledger.live_jobs()
    await channel.close()
