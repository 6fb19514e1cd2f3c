"""Workers that make the calls of real ones and compute nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpc import aio

from paceline.enums import StopReason, WorkerKind
from paceline.errors import DeadlineError, NotFoundError, PacelineError, UnavailableError
from paceline.platform.digest import digest_of
from paceline.platform.server.membership import Membership
from paceline.platform.transport.rpc import call, connect
from paceline.types import Worker
from paceline.v1 import experience_pb2 as ex
from paceline.v1 import types_pb2
from paceline.v1.experience_pb2_grpc import ExperienceStub
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline.v1.roster_pb2_grpc import RosterStub
from paceline_trainer.client import TrainerLedger

if TYPE_CHECKING:
    from paceline.v1.experience_pb2_grpc import ExperienceAsyncStub
    from paceline.v1.roster_pb2_grpc import RosterAsyncStub

BEAT_S = 0.3
_PAUSE_S = 0.05
PLAY_S = 0.002
SLOTS = 64
FIRST_STEPS = 2
LATE_STEP = 6  # from which the loss is 1, not 0
_KEPT = 2  # checkpoints
_WEIGHTS = "weights"


@dataclass(slots=True)
class Progress:
    """What all workers know of all jobs at once.

    Until jobs may end, they train no more than the first steps, so they stay running.
    """

    versions: dict[str, int] = field(default_factory=dict[str, int])  # loaded when published
    steps: dict[str, int] = field(default_factory=dict[str, int])
    may_end: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class WorkerContext:
    """Where a worker runs, and as what."""

    name: str
    kind: WorkerKind
    address: str  # of the experience service
    run_dir: Path
    progress: Progress
    job_id: str = ""
    incarnation: int = 0
    credential: str = ""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    def worker(self) -> Worker:
        """As it is in the roster."""
        return Worker(
            worker_id=self.name,
            kind=self.kind,
            endpoint="127.0.0.1:1",
            job_id=self.job_id,
            active_version=self.progress.versions.get(self.job_id, -1),
        )

    def membership(self, channel: aio.Channel) -> Membership:
        """Its entry in the roster."""
        roster: RosterAsyncStub = RosterStub(channel)
        return Membership(roster=roster, report=self.worker, period_s=BEAT_S)


async def work(context: WorkerContext) -> None:
    """Work until asked to stop, or until the work is done."""
    main = {
        WorkerKind.TRAINER: train,
        WorkerKind.ROLLOUT: idle,
        WorkerKind.ENVIRONMENT: play,
        WorkerKind.REWARD: idle,
    }[context.kind]
    async with connect(context.address, token=context.credential) as channel:
        membership = context.membership(channel)
        beats = asyncio.create_task(membership.run())
        try:
            await main(context, channel)
        finally:
            beats.cancel()
        await membership.leave()


async def idle(context: WorkerContext, channel: aio.Channel) -> None:
    """A reward worker that nobody calls, or a rollout worker."""
    await context.stopping.wait()


async def play(context: WorkerContext, channel: aio.Channel) -> None:
    """Complete all leased episodes with the newest version."""
    experience: ExperienceAsyncStub = ExperienceStub(channel)

    async def lease() -> None:
        requests: asyncio.Queue[ex.LeaseRequest] = asyncio.Queue()
        first = ex.LeaseRequest(worker_id=context.name, credits=SLOTS, eval_credits=SLOTS)
        first.renew_is_complete = True  # what it had is lost with the stream
        requests.put_nowait(first)

        async def sent() -> AsyncIterator[ex.LeaseRequest]:
            while True:
                yield await requests.get()

        async def complete(given: types_pb2.Assignment) -> None:
            await asyncio.sleep(PLAY_S)
            is_eval = given.purpose == types_pb2.PURPOSE_EVAL
            if not is_eval and context.progress.steps.get(given.job_id, 0) >= FIRST_STEPS:
                await context.progress.may_end.wait()
            version = context.progress.versions.get(given.job_id, 0)
            places = range(len(given.indices))
            made = [trajectory(given, place, newest=version) for place in places]
            request = ex.SubmitRequest(job_id=given.job_id, trajectories=made)
            with suppress(PacelineError):  # the lease ends with the stream
                await call(experience.Submit, request, timeout_s=5.0)
            free = ex.LeaseRequest()
            if is_eval:
                free.eval_credits = len(made)
            else:
                free.credits = len(made)
            requests.put_nowait(free)

        playing: set[asyncio.Task[None]] = set()
        try:
            async for reply in experience.Lease(sent()):
                for given in reply.assignments:
                    task = asyncio.create_task(complete(given))
                    playing.add(task)
                    task.add_done_callback(playing.discard)
        finally:
            for task in playing:
                task.cancel()

    await _unless_stopped(context.stopping, _reconnecting(lease))


async def train(context: WorkerContext, channel: aio.Channel) -> None:
    """Begin at the newest checkpoint; write one after every second step, and at the end."""
    ledger = TrainerLedger(
        experience=ExperienceStub(channel),
        roster=RosterStub(channel),
        jobs=JobsStub(channel),
        job_id=context.job_id,
        incarnation=context.incarnation,
    )
    checkpoints = Checkpoints(context, ledger)
    step = await checkpoints.newest()
    step, parent = await ledger.rewind(step)
    stop: StopReason | None = None
    published = saved = -1

    async def publish() -> int:
        made = await ledger.publish_version(
            step=step, parent=parent, endpoint="http://t", num_bytes=8, part=0, parts=1
        )
        context.progress.versions[context.job_id] = made.version.version
        context.progress.steps[context.job_id] = step
        return made.version.version

    while not context.stopping.is_set():
        if published != step:
            parent, published = await publish(), step
        share = await _unless_stopped(context.stopping, ledger.take(step, rank=0, world=1))
        stop = None if share is None else share.stop
        if share is None or stop is not None:
            break
        stop = await ledger.commit(step, share.batch_id, {"loss": float(step >= LATE_STEP)})
        if stop is StopReason.CANCELLED:
            break
        step += 1
        if step % 2 == 0:
            await checkpoints.write(step)
            saved = step
    if stop is not StopReason.CANCELLED and saved != step:
        await checkpoints.write(step)
    if stop is StopReason.FINISHED and published != step:
        await publish()
    while stop is StopReason.FINISHED and not context.stopping.is_set():
        if (await ledger.job()).status.state.terminal:
            return
        await asyncio.sleep(_PAUSE_S)


class Checkpoints:
    """Folders with a file each."""

    def __init__(self, context: WorkerContext, ledger: TrainerLedger) -> None:
        self._context = context
        self._ledger = ledger
        self._folder = context.run_dir / "jobs" / context.job_id / "checkpoints"

    async def newest(self) -> int:
        """The step of the newest one that ledger and disk have; 0: none."""
        step = (await self._ledger.job()).status.step
        recorded = await self._ledger.checkpoints()
        known = [each for each in recorded if each <= step and any(self._of(each))]
        return max(known, default=0)

    async def write(self, step: int) -> None:
        """Write and commit one, and remove those that need not stay."""
        if not step:
            return
        folder = self._folder / f"step-{step:06d}.{self._context.incarnation}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _WEIGHTS).write_text(f"{step}")
        content = json.dumps({"step": step, "files": {_WEIGHTS: {"num_bytes": 1}}}).encode()
        (folder / "paceline.json").write_bytes(content)
        kept = sorted({int(path.name[5:11]) for path in self._folder.iterdir()})
        stay = await self._ledger.commit_checkpoint(
            step, str(folder), kept=kept, digest=digest_of(content)
        )
        for old in kept[:-_KEPT]:
            for path in [] if old in stay else self._of(old):
                for file in path.iterdir():
                    file.unlink()
                path.rmdir()

    def _of(self, step: int) -> list[Path]:
        return [*self._folder.glob(f"step-{step:06d}.*")]


async def _unless_stopped(stopping: asyncio.Event, wanted: Awaitable[Any]) -> Any:
    """The result, or None if asked to stop before."""
    stop = asyncio.create_task(stopping.wait())
    result = asyncio.ensure_future(wanted)
    try:
        await asyncio.wait({stop, result}, return_when=asyncio.FIRST_COMPLETED)
        return result.result() if result.done() else None
    finally:
        stop.cancel()
        result.cancel()


async def _reconnecting(connected: Callable[[], Awaitable[None]]) -> None:
    """Connect again whenever that has ended, until cancelled."""
    while True:
        with suppress(aio.AioRpcError, UnavailableError, DeadlineError, NotFoundError):
            await connected()
        await asyncio.sleep(_PAUSE_S)


def trajectory(
    given: types_pb2.Assignment, place: int, *, newest: int = 0, eval_reward: float = 1.0
) -> types_pb2.Trajectory:
    """A short trajectory of the pinned or the newest version; rewards of a group differ."""
    index = given.indices[place]
    transcript = types_pb2.Transcript(
        tokens=[1, 2, 3],
        spans=[
            types_pb2.TokenSpan(start=0, end=2, source=types_pb2.TOKEN_SOURCE_TEMPLATE),
            types_pb2.TokenSpan(start=2, end=3, source=types_pb2.TOKEN_SOURCE_POLICY),
        ],
        logprobs=[-0.5],
        versions=[types_pb2.VersionRun(version=max(given.pinned_version, newest), count=1)],
        parent=-1,
    )
    is_eval = given.purpose == types_pb2.PURPOSE_EVAL
    return types_pb2.Trajectory(
        group_id=given.group_id,
        index=index,
        attempt=given.attempts[place],
        task_id=given.task.task_id,
        purpose=given.purpose,
        transcripts=[transcript],
        score=types_pb2.Score(
            reward=eval_reward if is_eval else index % 2, status=types_pb2.SCORE_STATUS_OK
        ),
        sampling=types_pb2.SamplingParams(max_tokens=4, temperature=1.0),
    )
