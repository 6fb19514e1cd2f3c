"""A worker of one job is nobody in another: every call of trainers and rollout workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import generate_latest
from redis.asyncio import Redis

from paceline.config import ServiceSettings
from paceline.enums import JobState, WorkerKind
from paceline.errors import (
    AuthenticationError,
    DeadlineError,
    FencedError,
    InvalidError,
    NotFoundError,
    PacelineError,
    PermissionDeniedError,
)
from paceline.platform import wire
from paceline.platform.server.chassis import Chassis, serve
from paceline.platform.transport.job_credential import JOB_KINDS
from paceline.platform.transport.operations import Operation, operation, operations
from paceline.platform.transport.rpc import connect, stream
from paceline.platform.transport.service_keys import issue
from paceline.v1 import experience_pb2 as ex
from paceline.v1 import jobs_pb2, roster_pb2, types_pb2
from paceline_experience.service import build
from paceline_harness.callers.service_keys import metadata_of
from paceline_harness.certificates import Authority
from paceline_harness.patience import PATIENCE_S, call

if TYPE_CHECKING:
    from paceline_harness.experience_service.clients import Client

TRAINER, ROLLOUT = WorkerKind.TRAINER, WorkerKind.ROLLOUT
REFUSALS = (AuthenticationError, PermissionDeniedError, FencedError)


@dataclass(frozen=True)
class Job:
    """A job, its workers and what they show; its trainer is of the second incarnation."""

    job_id: str
    artifact: str
    shown: dict[str, str] = field(repr=False)  # credentials by what they are

    @property
    def workers(self) -> dict[WorkerKind, str]:
        return {TRAINER: f"trainer-{self.job_id}", ROLLOUT: f"rollout-{self.job_id}-0"}


def worker_of(job: Job, kind: WorkerKind) -> types_pb2.Worker:
    return types_pb2.Worker(
        worker_id=job.workers[kind], kind=wire.number_of(kind), job_id=job.job_id
    )


def of_job(kind: type[Any], **fields: Any) -> Callable[[Job, WorkerKind], Any]:
    return lambda job, _: kind(job_id=job.job_id, **fields)


def as_worker(kind: type[Any], **fields: Any) -> Callable[[Job, WorkerKind], Any]:
    return lambda job, caller: kind(worker_id=job.workers[caller], **fields)


# By method: the request of a worker. In an order in which all are possible.
REQUESTS: dict[tuple[str, str], Callable[[Job, WorkerKind], Any]] = {
    ("Roster", "Join"): lambda job, kind: roster_pb2.JoinRequest(worker=worker_of(job, kind)),
    ("Roster", "Heartbeat"): as_worker(roster_pb2.HeartbeatRequest),
    ("Jobs", "GetJob"): of_job(jobs_pb2.GetJobRequest),
    ("Experience", "GetArtifact"): lambda job, _: ex.GetArtifactRequest(digest=job.artifact),
    ("Experience", "ListCheckpoints"): of_job(ex.ListCheckpointsRequest, incarnation=2),
    ("Experience", "Rewind"): of_job(ex.RewindRequest, incarnation=2),
    ("Roster", "PublishVersion"): of_job(
        roster_pb2.PublishVersionRequest, incarnation=2, num_bytes=1, weights_endpoint="http://t"
    ),
    ("Roster", "WatchRoute"): lambda job, kind: roster_pb2.WatchRouteRequest(
        job_id=job.job_id, worker_id=job.workers[kind]
    ),
    ("Roster", "ReportTransfer"): lambda job, kind: roster_pb2.ReportTransferRequest(
        job_id=job.job_id,
        worker_id=job.workers[kind],
        event=roster_pb2.TRANSFER_EVENT_STALLED,
    ),
    ("Experience", "TakeBatch"): of_job(ex.TakeBatchRequest, incarnation=2, world=1),
    ("Experience", "CommitStep"): of_job(ex.CommitStepRequest, incarnation=2),
    ("Experience", "CommitCheckpoint"): of_job(ex.CommitCheckpointRequest, incarnation=2, path="p"),
    ("Experience", "ReportFailure"): of_job(ex.ReportFailureRequest, incarnation=2, reason="r"),
    ("Roster", "Leave"): as_worker(roster_pb2.LeaveRequest),
    ("Experience", "SetJobState"): of_job(
        ex.SetJobStateRequest, state=types_pb2.JOB_STATE_FAILED, reason="r"
    ),
}
# What a worker shows that is not its own, and the refusal.
WRONG: dict[str, type[PacelineError] | tuple[type[PacelineError], ...]] = {
    "nothing": AuthenticationError,
    "no credential": AuthenticationError,
    "a changed one": AuthenticationError,
    "one of an unknown job": AuthenticationError,
    "that of another job": PermissionDeniedError,
    "that of the other kind": PermissionDeniedError,
    "that of another worker": PermissionDeniedError,
    "that of the incarnation before": (FencedError, PermissionDeniedError),
}


def calls() -> Iterable[tuple[Operation, WorkerKind]]:
    """Each method with each kind of worker of a job that may call it, in order."""
    for service, name in REQUESTS:
        found = operation(service, name)
        yield from ((found, kind) for kind in sorted(found.callers & JOB_KINDS))


def test_every_method_of_a_worker_is_tried() -> None:
    found = {(each.service, each.name) for each in operations().values()}
    ours = {(e.service, e.name) for e in operations().values() if e.callers & JOB_KINDS}
    assert ours == set(REQUESTS)
    assert ours < found
    assert not any(e.streams_requests for e in operations().values() if e.callers & JOB_KINDS)


class Place:
    """The service as it is started in production, and those who call it."""

    def __init__(
        self, chassis: Chassis, authority: Authority | None, clients: type[Client]
    ) -> None:
        self.chassis = chassis
        self._authority = authority
        self._keys = chassis.settings.run_dir / "keys"
        self._clients = clients
        self._channels: list[Any] = []

    def client(self, kind: WorkerKind, credential: str = "") -> Client:
        if self._authority is None:
            proof = metadata_of(self._keys, WorkerKind.EXPERIENCE, kind)
            channel = connect(self.chassis.address, token=credential, metadata=proof)
        else:
            tls = self._authority.issue(kind, kinds=[kind])
            channel = connect(self.chassis.address, tls=tls, token=credential)
        self._channels.append(channel)
        return self._clients(channel, self.chassis.address)

    def proof(self, kind: WorkerKind) -> str:
        """What a kind of service shows where there are no certificates."""
        ((_, text),) = metadata_of(self._keys, WorkerKind.EXPERIENCE, kind)
        return text

    async def job(self, name: str) -> Job:
        """A new job with credentials of all kinds."""
        config = json.dumps({"of": name}).encode()
        made = await self.client(WorkerKind.GATEWAY).submit(name=name, config=config)
        job_id, artifact = made.status.job_id, made.artifacts["config.json"]
        controller = self.client(WorkerKind.CONTROLLER)

        async def credential(kind: WorkerKind, worker: str, incarnation: int = 0) -> str:
            return await controller.credential(job_id, kind, worker, incarnation)

        grant = ex.GrantIncarnationRequest(job_id=job_id)
        job = Job(job_id, artifact, {})
        trainer, rollout = job.workers[TRAINER], job.workers[ROLLOUT]
        await call(controller.experience.GrantIncarnation, grant)
        job.shown["old trainer"] = await credential(TRAINER, trainer, 1)
        await call(controller.experience.GrantIncarnation, grant)
        job.shown["trainer"] = await credential(TRAINER, trainer, 2)
        job.shown["rollout"] = await credential(ROLLOUT, rollout)
        job.shown["other trainer"] = await credential(TRAINER, f"{trainer}x", 2)
        job.shown["other rollout"] = await credential(ROLLOUT, f"rollout-{job_id}-1")
        with pytest.raises(FencedError):
            await credential(TRAINER, trainer, 1)
        return job

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


@asynccontextmanager
async def started(store_url: str, run_dir: Path, tls: bool, clients: Any) -> AsyncGenerator[Place]:
    authority = Authority(run_dir) if tls else None
    made: asyncio.Future[Chassis] = asyncio.get_running_loop().create_future()

    async def remembered(chassis: Chassis) -> Any:
        made.set_result(chassis)
        return await build(chassis)

    kind = WorkerKind.EXPERIENCE
    settings = ServiceSettings(
        kind=kind,
        worker_id="experience-0",
        run_dir=run_dir,
        store_url=store_url,
        tls=None if authority is None else authority.issue("e", kinds=[kind]),
        service_keys=issue(run_dir / "keys", [kind])[kind] if authority is None else None,
    )
    running = asyncio.create_task(serve(settings, remembered))
    await asyncio.wait({made, running}, return_when=asyncio.FIRST_COMPLETED)
    chassis = made.result()
    while chassis.health.why_unready():
        assert not running.done()
        await asyncio.sleep(0.01)
    place = Place(chassis, authority, clients)
    try:
        yield place
    finally:
        await place.close()
        chassis.stop()
        await running


async def tried(client: Client, found: Operation, request: Any) -> Any:
    """The error of a call; None: it went well, or waits for something that does not come."""
    stub = {"Roster": client.roster, "Jobs": client.jobs, "Experience": client.experience}
    method: Any = getattr(stub[found.service], found.name)
    try:
        if found.streams_replies:
            async for _ in stream(method, request, timeout_s=0.5):
                break
        else:
            await call(method, request, timeout_s=PATIENCE_S)
    except DeadlineError:
        return None
    except PacelineError as error:
        return error
    return None


def shown(wrong: str, kind: WorkerKind, own: Job, other: Job) -> str:
    """A credential that is not that of the worker which makes a call."""
    rest = {"trainer": "rollout", "rollout": "trainer"}
    right = own.shown[kind]
    return {
        "nothing": "",
        "no credential": "plj_x",
        "a changed one": right.replace(f"/{kind}/", f"/{rest[kind]}/"),
        "one of an unknown job": right.replace(own.job_id, "sums-000000"),
        "that of another job": other.shown[kind],
        "that of the other kind": own.shown[rest[kind]],
        "that of another worker": own.shown[f"other {kind}"],
        "that of the incarnation before": own.shown["old trainer"],
    }[wrong]


def concerns(wrong: str, found: Operation, kind: WorkerKind) -> bool:
    """Whether what is wrong makes a difference to a method."""
    names = {field.name for field in found.request.DESCRIPTOR.fields}
    if wrong == "that of the other kind":
        return found.name != "GetJob"
    if wrong == "that of another worker":
        return bool(names & {"worker", "worker_id"})
    return kind is TRAINER if wrong == "that of the incarnation before" else True


@pytest.mark.parametrize("tls", [True, False], ids=["certificates", "keys"])
async def test_a_credential_that_is_not_ones_own_is_refused(
    one_store: str, client_class: type[Client], tmp_path: Path, tls: bool
) -> None:
    async with started(one_store, tmp_path, tls, client_class) as place:
        own, other = await place.job("own"), await place.job("other")
        for kind in (TRAINER, ROLLOUT):  # so that heartbeats speak of somebody
            join = REQUESTS["Roster", "Join"](own, kind)
            await call(place.client(kind, own.shown[kind]).roster.Join, join)
        for wrong, (found, kind) in product(WRONG, calls()):
            if concerns(wrong, found, kind):
                client = place.client(kind, shown(wrong, kind, own, other))
                request = REQUESTS[found.service, found.name](own, kind)
                error = await tried(client, found, request)
                assert isinstance(error, WRONG[wrong]), f"{wrong}: {kind} {found.name}: {error!r}"
                assert own.artifact not in str(error)
                assert not any(text in str(error) for text in own.shown.values())


@pytest.mark.parametrize("tls", [True, False], ids=["certificates", "keys"])
async def test_with_their_own_workers_do_their_work_and_it_shows_nowhere(
    one_store: str,
    client_class: type[Client],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    tls: bool,
) -> None:
    caplog.set_level("DEBUG")
    async with started(one_store, tmp_path, tls, client_class) as place:
        own, other = await place.job("own"), await place.job("other")
        for found, kind in calls():
            client = place.client(kind, own.shown[kind])
            error = await tried(client, found, REQUESTS[found.service, found.name](own, kind))
            assert not isinstance(error, REFUSALS), f"{kind} {found.name}: {error!r}"
        gateway, controller = (
            place.client(kind) for kind in (WorkerKind.GATEWAY, WorkerKind.CONTROLLER)
        )
        answers = [
            await gateway.get(own.job_id),
            await call(gateway.jobs.ListJobs, jobs_pb2.ListJobsRequest()),
            await call(
                gateway.jobs.ListWeights, roster_pb2.ListWeightsRequest(job_id=other.job_id)
            ),
            await call(controller.roster.ListWorkers, roster_pb2.ListWorkersRequest()),
        ]
        told = (
            "\n".join(map(str, answers)) + generate_latest(place.chassis.metrics.registry).decode()
        )
    keys = (tmp_path / "keys").rglob("*")
    secret = {*tmp_path.glob("*.pem"), *keys}
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path not in secret]
    told += "\n".join(path.read_text(errors="replace") for path in written)
    assert "joined" in caplog.text
    told += caplog.text + "\n".join(str(vars(record)) for record in caplog.records)
    shown_by_kinds = [] if tls else [place.proof(kind) for kind in WorkerKind]
    for credential in [*own.shown.values(), *other.shown.values(), *shown_by_kinds]:
        assert credential not in told
        assert credential.rpartition("/")[2] not in told


async def test_heartbeats_tell_the_workers_of_a_job_nothing_of_other_jobs(
    one_store: str, client_class: type[Client], tmp_path: Path
) -> None:
    async with started(one_store, tmp_path, False, client_class) as place:
        own, other = await place.job("own"), await place.job("other")
        await place.client(WorkerKind.CONTROLLER).set_state(other.job_id, JobState.FAILED)

        async def told(client: Client, worker: types_pb2.Worker) -> list[str]:
            await call(client.roster.Join, roster_pb2.JoinRequest(worker=worker))
            beat = roster_pb2.HeartbeatRequest(
                worker_id=worker.worker_id, kept_jobs=[other.job_id, "sums-000000"]
            )
            return list((await call(client.roster.Heartbeat, beat)).ended_jobs)

        for kind in JOB_KINDS:
            worker = worker_of(own, kind)
            assert await told(place.client(kind, own.shown[kind]), worker) == []
        shared = types_pb2.Worker(
            worker_id="environment-0", kind=wire.number_of(WorkerKind.ENVIRONMENT)
        )
        client = place.client(WorkerKind.ENVIRONMENT)
        assert sorted(await told(client, shared)) == sorted([other.job_id, "sums-000000"])


async def test_credentials_outlive_the_service_and_end_with_their_incarnation(
    one_store: str, client_class: type[Client], tmp_path: Path
) -> None:
    async with started(one_store, tmp_path, False, client_class) as place:
        job = await place.job("own")
    async with started(one_store, tmp_path, False, client_class) as place:
        trainer = place.client(TRAINER, job.shown["trainer"])
        join = REQUESTS["Roster", "Join"](job, TRAINER)
        await call(trainer.roster.Join, join)
        controller = place.client(WorkerKind.CONTROLLER)
        grant = ex.GrantIncarnationRequest(job_id=job.job_id)
        await call(controller.experience.GrantIncarnation, grant)
        beat = roster_pb2.HeartbeatRequest(worker_id=job.workers[TRAINER])
        with pytest.raises(FencedError, match="incarnation 2 is not the newest, which is 3"):
            await call(trainer.roster.Heartbeat, beat)


@pytest.mark.parametrize("lost", [False, True], ids=["restarted", "the store has lost the grant"])
async def test_a_replaced_trainer_is_refused_before_the_ledger_is_open_again(
    one_store: str, client_class: type[Client], tmp_path: Path, lost: bool
) -> None:
    async with started(one_store, tmp_path, False, client_class) as place:
        job = await place.job("own")
        await place.client(WorkerKind.CONTROLLER).set_state(job.job_id, JobState.FAILED)
    if lost:
        async with Redis.from_url(one_store) as store:
            records = [
                key
                async for key in store.scan_iter(f"*{job.job_id}*", _type="hash")
                if await store.hexists(key, "incarnation") and await store.hexists(key, "name")
            ]
            (record,) = records
            assert await store.hset(record, "incarnation", "1") == 0
    # Nothing opens the ledger of a job that is over; others are opened before any call is taken,
    # except those that cannot be opened for now.
    async with started(one_store, tmp_path, False, client_class) as place:
        old, new = (place.client(TRAINER, job.shown[name]) for name in ("old trainer", "trainer"))
        with pytest.raises(FencedError, match="incarnation 1 is not the newest, which is 2"):
            await old.set_state(job.job_id, JobState.FAILED)
        await new.set_state(job.job_id, JobState.FAILED)


async def test_only_workers_that_belong_to_a_job_get_one(client: Client) -> None:
    job_id = (await client.submit()).status.job_id
    for kind in set(WorkerKind) - JOB_KINDS:
        with pytest.raises(InvalidError, match="does not name a trainer or rollout worker"):
            await client.credential(job_id, kind, "w")
    with pytest.raises(InvalidError, match="incarnation"):
        await client.credential(job_id, ROLLOUT, "w", 1)
    with pytest.raises(InvalidError, match="incarnation"):
        await client.credential(job_id, TRAINER, "w")
    with pytest.raises(NotFoundError, match="job 'none' is not known"):
        await client.credential("none", ROLLOUT, "w")
    with pytest.raises(InvalidError, match="does not name a trainer or rollout worker"):
        await client.credential(job_id, ROLLOUT, "w/rollout/w/0")


async def test_a_worker_cannot_take_the_place_of_another_jobs(client: Client) -> None:
    """The names of its workers begin like its own."""
    victim = (await client.submit()).status.job_id
    name = f"rollout-{victim}-0"
    worker = types_pb2.Worker(worker_id=name, kind=wire.number_of(ROLLOUT), job_id=victim)
    rollout = await client.rollout(victim, name)
    await call(rollout.roster.Join, roster_pb2.JoinRequest(worker=worker))
    job_id = (await client.submit()).status.job_id
    thief = await client.rollout(job_id, f"rollout-{victim}")
    worker.job_id = job_id
    attempts: list[tuple[Any, Any]] = [
        (thief.roster.Join, roster_pb2.JoinRequest(worker=worker)),
        (thief.roster.Heartbeat, roster_pb2.HeartbeatRequest(worker_id=name)),
        (thief.roster.Leave, roster_pb2.LeaveRequest(worker_id=name)),
    ]
    for method, request in attempts:
        with pytest.raises(PermissionDeniedError, match="job_id: the credential of rollout-"):
            await call(method, request)
    beat = roster_pb2.HeartbeatRequest(worker_id=name)
    await call(rollout.roster.Heartbeat, beat)  # it is still the member
