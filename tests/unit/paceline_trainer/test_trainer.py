from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import current_thread
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from paceline.config import parse_job
from paceline.config.service import ProbeSettings
from paceline.enums import JobState, Phase
from paceline.errors import FencedError, InvalidError, StateError, UnavailableError
from paceline.methods.objective.load import load_objective
from paceline.platform.server.liveness import ProcessProgress
from paceline.platform.server.phase_report import PhaseReport
from paceline.platform.transport.rpc import connect
from paceline.types import WorkerPhase
from paceline.v1.experience_pb2_grpc import ExperienceStub
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline.v1.roster_pb2_grpc import RosterStub
from paceline.weights import HttpTransport, Staging, TransportSettings, pull
from paceline.weights.cost import MIN_CHUNK_BYTES
from paceline_harness.patience import PATIENCE_S
from paceline_trainer.checkpoints.checkpoint import Checkpoints
from paceline_trainer.checkpoints.state import COPIED_BYTES
from paceline_trainer.client import TrainerLedger
from paceline_trainer.liveness import TrainerLiveness
from paceline_trainer.phase_clock import PhaseClock
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.learner import Learner
from paceline_trainer.step.loading import load_policy
from paceline_trainer.step.mismatch.comparison import mismatch_of
from paceline_trainer.step.model import shard
from paceline_trainer.step.optimizer import Optimizer
from paceline_trainer.step.versions import WeightHistory
from paceline_trainer.trainer import Trainer, TrainingBackend
from paceline_trainer.weights.publish import Publisher, Snapshotter
from paceline_trainer.work_thread import WorkThread

LIMIT_S = PATIENCE_S
Make = Callable[..., Trainer]


class Watched(MemoryFileSystem):
    """An object store that notes which threads have waited for its answers."""

    protocol = "watched"
    waited: set[str] = set()  # noqa: RUF012

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        self.waited.add(current_thread().name)
        return super().ls(path, detail, **kwargs)

    def _rm(self, path: str) -> None:
        self.waited.add(current_thread().name)
        super()._rm(path)


class Stuck(MemoryFileSystem):
    """An object store that takes a file only after `released`, and then perhaps refuses it."""

    protocol = "stuck"
    released = threading.Event()
    error: OSError | None = None

    def _open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        if "w" in mode:
            assert self.released.wait(LIMIT_S)
            if self.error is not None:
                raise self.error
        return super()._open(path, mode, *args, **kwargs)


@pytest.fixture
def stuck() -> Iterator[type[Stuck]]:
    fsspec.register_implementation("stuck", Stuck, clobber=True)
    Stuck.released.clear()
    Stuck.error = None
    yield Stuck
    Stuck.released.set()


@pytest.fixture
async def server() -> AsyncIterator[tuple[HttpTransport, str]]:
    made = HttpTransport(TransportSettings(host="127.0.0.1"))
    yield made, await made.start()
    await made.close()


@pytest.fixture
def histories() -> dict[int, WeightHistory]:
    """Of the trainers that were made, by incarnation."""
    return {}


@pytest.fixture
async def make(
    one_job: Any,
    group: RankGroup,
    tmp_path: Path,
    server: tuple[HttpTransport, str],
    histories: dict[int, WeightHistory],
) -> AsyncIterator[Make]:
    """Trainers of the job, by incarnation."""
    channel = connect(one_job.address)
    compute = ThreadPoolExecutor(1, thread_name_prefix="compute")

    def build(
        incarnation: int, place: Path | str = tmp_path, copied_bytes: int = COPIED_BYTES
    ) -> Trainer:
        spec = parse_job(one_job.spec)
        ledger = TrainerLedger(
            experience=ExperienceStub(channel),
            roster=RosterStub(channel),
            jobs=JobsStub(channel),
            job_id="j",
            incarnation=incarnation,
        )
        policy = load_policy(spec.model.path)
        shard(policy, group, dtype="float32")
        optimizer = Optimizer(policy, spec.trainer.optimizer, total_steps=10)
        snapshotter = Snapshotter(policy, group, engine_dtype="float32", dtype="float32")
        served = snapshotter.published_as
        assert served is not None
        mismatch = mismatch_of(spec, policy, group, served=served)
        histories[incarnation] = mismatch.history
        learner = Learner(
            policy=policy,
            optimizer=optimizer,
            objective=load_objective(spec.trainer.objective),
            group=group,
            budget=200,
            mismatch=mismatch,
        )
        engine = TrainingBackend(
            policy=policy,
            optimizer=optimizer,
            learner=learner,
            checkpoints=Checkpoints(
                place, group=group, keep=2, incarnation=incarnation, copied_bytes=copied_bytes
            ),
            snapshotter=snapshotter,
            mismatch=mismatch,
            group=group,
        )
        publisher = Publisher(
            ledger=ledger,
            transport=server[0],
            endpoint=server[1],
            incarnation=incarnation,
            history=mismatch.history,
        )
        return Trainer(
            engine=engine,
            ledger=ledger,
            publisher=publisher,
            compute=WorkThread(compute),
            spec=spec.trainer,
            clock=PhaseClock(),
        )

    yield build
    await channel.close()
    compute.shutdown()


async def reached(one_job: Any, trainer: Trainer, commits: int, phase: str) -> None:
    while len(one_job.commits) < commits or trainer.clock.phase != phase:
        await asyncio.sleep(0.01)


class Recorded(PhaseReport):
    """Keeps all phases, with how far each has come."""

    def __init__(self) -> None:
        self.all: list[WorkerPhase] = []
        super().__init__(Phase.LOADING_MODEL)

    def enter(self, phase: Phase, *, number: int = -1, total: float = 0.0) -> None:
        self.all.append(self.now)
        super().enter(phase, number=number, total=total)


async def test_a_trainer_reports_its_phases_and_micro_batches(one_job: Any, make: Make) -> None:
    trainer = make(1)
    trainer.clock.report = report = Recorded()
    await asyncio.wait_for(trainer.run(), LIMIT_S)
    seen = [(each.name, each.number) for each in report.all]
    for step in (1, 2):
        at = seen.index((Phase.STEPPING, step))
        assert seen[at - 1] == (Phase.WAITING_FOR_BATCH, step)
        assert seen[at + 1] == (Phase.COMMITTING, step)
        assert report.all[at].done >= 1


async def test_a_slow_storage_holds_nothing_else_up(one_job: Any, make: Make) -> None:
    """The event loop says that this process lives, and serves weights."""
    fsspec.register_implementation("watched", Watched, clobber=True)
    place = "watched://bucket/checkpoints"
    Watched.waited.clear()
    await asyncio.wait_for(make(1, place).run(), LIMIT_S)
    await asyncio.wait_for(make(2, place).resume(), LIMIT_S)
    assert Watched.waited == {"compute_0", "checkpoint_0"}


async def test_steps_go_on_until_the_next_checkpoint_while_one_is_written(
    one_job: Any, make: Make, stuck: type[Stuck]
) -> None:
    one_job.limit = 100
    trainer = make(1, "stuck://bucket/checkpoints")
    running = asyncio.create_task(trainer.run())
    async with asyncio.timeout(LIMIT_S):
        await reached(one_job, trainer, 4, "checkpointing")
        await asyncio.sleep(0.2)
        assert (len(one_job.commits), one_job.checkpoints) == (4, [])
        watched = TrainerLiveness(clock=trainer.clock, trainer=lambda: trainer)
        # A storage that never answers ends this process, but no slow one does.
        assert watched.writing().pending
        assert not watched.work("checkpointing").pending
        stuck.released.set()
        while len(one_job.checkpoints) < 2:
            await asyncio.sleep(0.01)
        assert one_job.checkpoints[:2] == [2, 4]
        trainer.stop()
        await running
    assert one_job.checkpoints[-1] == trainer.step


async def test_a_state_that_is_not_copied_holds_up_the_next_update(
    one_job: Any,
    make: Make,
    group: RankGroup,
    tmp_path: Path,
    server: tuple[HttpTransport, str],
) -> None:
    one_job.limit = 3
    trainer = make(1, copied_bytes=0)
    released = threading.Event()
    trainer.writer.submit(released.wait, LIMIT_S)  # as a disk that is busy
    running = asyncio.create_task(trainer.run())
    async with asyncio.timeout(LIMIT_S):
        await reached(one_job, trainer, 2, "stepping")
        await asyncio.sleep(0.2)
        assert (len(one_job.commits), one_job.checkpoints) == (2, [])
        released.set()
        await running
    assert one_job.checkpoints == [2, 3]
    spec = parse_job(one_job.spec)
    policy = load_policy(spec.model.path)
    optimizer = Optimizer(policy, spec.trainer.optimizer, total_steps=10)
    Checkpoints(tmp_path, group=group, keep=2).load(2, policy, optimizer)
    stagings = [server[0].server.held("j", version) for version in server[0].server.versions()]
    held = next(each for each in stagings if each is not None and each.header.step == 2)
    own = policy.inner.state_dict()
    for entry, data in held.tensors():
        values = torch.frombuffer(data, dtype=torch.float32).view(entry.shape)
        assert torch.equal(own[entry.name], values), entry.name


async def test_a_checkpoint_that_cannot_be_written_ends_it_while_it_waits_for_a_batch(
    one_job: Any, make: Make, stuck: type[Stuck]
) -> None:
    one_job.holds_from = 3
    trainer = make(1, "stuck://bucket/checkpoints")
    running = asyncio.create_task(trainer.run())
    async with asyncio.timeout(LIMIT_S):
        await reached(one_job, trainer, 3, "waiting")
        stuck.error = OSError("403")
        stuck.released.set()
        with pytest.raises(UnavailableError, match=r"step-000002[.]1: .*403"):
            await running


async def test_a_whole_job(one_job: Any, make: Make) -> None:
    one_job.fresh = True  # so that the trainer knows the version of every batch
    trainer = make(1)
    await asyncio.wait_for(trainer.run(), LIMIT_S)
    assert [step for _, step, _ in one_job.commits] == [0, 1, 2, 3]
    assert [v.step for v in one_job.versions] == [0, 1, 2, 3, 4]
    assert [v.parent for v in one_job.versions] == [-1, 0, 1, 2, 3]
    assert one_job.checkpoints == [2, 4]
    metrics = [told for _, _, told in one_job.commits]
    for name in ("loss", "grad_norm", "lr", "wait_s", "step_s", "publish_s", "checkpoint_s"):
        assert name in metrics[-1]
    sampled, checked = (
        sum(told[name] for told in metrics) for name in ("versions_sampled", "versions_checked")
    )
    assert sampled == checked == 4
    assert all(told["mismatch_tokens"] > 0 for told in metrics)


async def test_what_is_served_is_kept_for_the_check_of_a_version_and_no_copy(
    one_job: Any,
    make: Make,
    server: tuple[HttpTransport, str],
    histories: dict[int, WeightHistory],
) -> None:
    await asyncio.wait_for(make(1).run(), LIMIT_S)
    newest = max(server[0].server.versions())
    staging = server[0].server.held("j", newest)
    assert staging is not None
    kept = histories[1].find(staging.header.step)
    assert kept is not None
    begin = torch.frombuffer(staging.buffer(), dtype=torch.uint8).data_ptr()
    places = [each.data_ptr() - begin for each in kept]
    assert sorted(places) == sorted(entry.offset for entry in staging.header.tensors)


async def test_weights_that_no_engine_accepts_are_published_again(
    one_job: Any, make: Make, server: tuple[HttpTransport, str]
) -> None:
    one_job.fresh = True
    one_job.refused = {0, 2, 3}
    trainer = make(1)
    running = asyncio.create_task(trainer.run())
    async with asyncio.timeout(LIMIT_S):
        await running
    assert [v.step for v in one_job.versions] == [0, 0, 1, 1, 1, 2, 3, 4]
    assert [v.parent for v in one_job.versions] == [-1, 0, 1, 2, 3, 4, 5, 6]
    assert [step for _, step, _ in one_job.commits] == [0, 1, 2, 3]
    assert [step for _, step, _ in one_job.taken] == [0, 1, 2, 3]
    metrics = [told for _, _, told in one_job.commits]
    assert sum(told["versions_checked"] for told in metrics) == 4


@pytest.mark.parametrize(
    ("every", "says"),
    [
        (4, "[.] There is no checkpoint yet$"),
        # A step that changed nothing is checkpointed like any other.
        (2, "[.] The newest checkpoint is of step 2: .*/step-000002[.]1$"),
    ],
)
async def test_a_loss_that_stays_nan_ends_the_job_with_the_place_of_its_checkpoint(
    one_job: Any, make: Make, every: int, says: str
) -> None:
    undefined = {"objective": {"surrogate": {"kind": "undefined", "first": 0}}}
    one_job.spec["trainer"] |= undefined | {"checkpoint": {"every": every}}
    trainer = make(1)
    with pytest.raises(InvalidError, match=f"in a row, the last one step 3[.] .*{says}"):
        await asyncio.wait_for(trainer.run(), LIMIT_S)


@pytest.mark.parametrize("told", [4096, 0])
async def test_published_weights_can_be_pulled(
    one_job: Any, make: Make, server: tuple[HttpTransport, str], told: int
) -> None:
    """0: a service of an earlier release does not say how to cut them."""
    one_job.chunk_bytes = told
    await asyncio.wait_for(make(1).run(), LIMIT_S)
    key = one_job.key
    staging = await pull(
        [server[1]],
        job_id="j",
        version=4,
        stage=lambda header: Staging(header, key=key),
        timeout_s=LIMIT_S,
        key=key,
    )
    assert staging.complete
    assert staging.header.chunk_bytes == (told or MIN_CHUNK_BYTES)
    assert staging.header.step == 4
    assert staging.root == one_job.digests[4]
    sequences = staging.header.canary.sequences
    assert sequences
    assert all(len(each.logprobs) == len(each.tokens) - 1 for each in sequences)


async def test_a_new_incarnation_goes_on_from_the_checkpoint(one_job: Any, make: Make) -> None:
    one_job.limit = 100
    first = asyncio.create_task(make(1).run())
    while not one_job.checkpoints:
        await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    one_job.limit = 6
    await asyncio.wait_for(make(2).run(), LIMIT_S)
    start = one_job.rewinds[-1]
    assert start >= 2
    assert start in one_job.checkpoints
    again = [step for incarnation, step, _ in one_job.commits if incarnation == 2]
    assert again == list(range(start, 6))
    announced = [v for v in one_job.versions if v.incarnation == 2]
    assert announced[0].step == start


async def text_of(server: tuple[HttpTransport, str], key: bytes, version: int) -> list[Any]:
    staging = await pull(
        [server[1]],
        job_id="j",
        version=version,
        stage=lambda header: Staging(header, key=key),
        timeout_s=LIMIT_S,
        key=key,
    )
    return [each.tokens for each in staging.header.canary.sequences]


async def test_a_new_incarnation_samples_no_other_text_for_its_canaries(
    one_job: Any, make: Make, server: tuple[HttpTransport, str]
) -> None:
    one_job.limit, key = 2, one_job.key
    await asyncio.wait_for(make(1).run(), LIMIT_S)
    before = await text_of(server, key, 2)
    one_job.limit, one_job.state = 4, JobState.RUNNING
    await asyncio.wait_for(make(2).run(), LIMIT_S)
    assert one_job.rewinds == [0, 2]
    assert await text_of(server, key, len(one_job.versions) - 1) == before


async def test_an_older_incarnation_ends(one_job: Any, make: Make) -> None:
    one_job.limit = 1000
    work = asyncio.create_task(make(1).run())
    while not one_job.commits:
        await asyncio.sleep(0.01)
    one_job.incarnation = 2
    with pytest.raises(FencedError, match="incarnation 1 was replaced"):
        await asyncio.wait_for(work, LIMIT_S)


async def test_a_refused_publication_ends_it_while_it_waits_for_a_batch(
    one_job: Any, make: Make
) -> None:
    """Nothing is sampled by a version that nobody serves: that batch would never come."""
    one_job.forgetful, one_job.holds_from = True, 0
    with pytest.raises(StateError, match="version 0 is served, but numbered 1 now"):
        await asyncio.wait_for(make(1).run(), PATIENCE_S)


async def test_stopped_between_steps_it_checkpoints(one_job: Any, make: Make) -> None:
    one_job.limit = 1000
    trainer = make(1)
    work = asyncio.create_task(trainer.run())
    while len(one_job.commits) < 3:
        await asyncio.sleep(0.01)
    trainer.stop()
    await asyncio.wait_for(work, LIMIT_S)
    assert trainer.stop_reason == "signal"
    assert one_job.checkpoints[-1] == one_job.step == trainer.step


async def test_at_the_end_it_serves_until_the_job_is_over(one_job: Any, make: Make) -> None:
    one_job.limit = 3
    one_job.spec["trainer"]["publish_every"] = 2
    await asyncio.wait_for(make(1).run(), LIMIT_S)
    assert [v.step for v in one_job.versions] == [0, 2, 3]
    assert one_job.checkpoints == [2, 3]
    assert one_job.state == "succeeded"


async def test_seconds_of_the_present_phase_count_before_it_is_over() -> None:
    clock = PhaseClock()
    with clock.measure("waiting", 1):
        await asyncio.sleep(0.05)
        first = clock.elapsed()["waiting"]
        assert first >= 0.05
        assert clock.seconds == {}
    assert clock.seconds["waiting"] >= first
    assert clock.elapsed() == clock.seconds


async def test_a_waiting_trainer_is_healthy_and_a_hanging_one_is_not(
    one_job: Any, make: Make
) -> None:
    one_job.holds_from = 2
    trainer, now = make(1), [0.0]
    settings = ProbeSettings(silent_s=10, dead_s=60, first_s=100)
    progress = ProcessProgress(settings, clock=lambda: now[0])
    TrainerLiveness(clock=trainer.clock, trainer=lambda: trainer).register(progress)

    async def pass_by(seconds: int) -> None:
        for _ in range(seconds):
            now[0] += 1
            progress.check()

    running = asyncio.create_task(trainer.run())
    async with asyncio.timeout(LIMIT_S):
        await reached(one_job, trainer, 2, "waiting")
        await trainer.checkpointed()
    await pass_by(10_000)
    assert (progress.why_unready(), progress.why_dead()) == ("", "")
    assert progress.status()["step"] == 2
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    released = threading.Event()
    with trainer.clock.measure("stepping", 1):
        hanging = asyncio.create_task(trainer.compute.run(released.wait))
        await asyncio.sleep(0.01)
        await pass_by(105)
        first = "stepping: 1 pending, no progress for 10"
        assert progress.why_unready().startswith(first)
        assert progress.why_dead().startswith(first)
        released.set()
        await hanging
    await pass_by(1)
    assert (progress.why_unready(), progress.why_dead()) == ("", "")
