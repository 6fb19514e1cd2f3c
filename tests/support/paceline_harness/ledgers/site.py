"""One job with the parts of the service that advance it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from paceline.config.limits import LimitSettings
from paceline.config.service import ExperienceOptions
from paceline.enums import Purpose, StopReason
from paceline.errors import PacelineError
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.telemetry.tracing import OFF
from paceline.types import (
    Job,
    JobStatus,
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
from paceline_experience.jobs.pausing import Pausing
from paceline_experience.jobs.service import JobService
from paceline_experience.jobs.submit.checks import SubmissionChecks
from paceline_experience.jobs.submit.in_flight import InFlight
from paceline_experience.jobs.submit.pipeline import JobSubmitter
from paceline_experience.jobs.submit.uploads import Uploads
from paceline_experience.jobs.training import Training
from paceline_experience.ledger.ledger import BatchShare, JobLedger
from paceline_experience.ledger.meter import JobMeter
from paceline_experience.store.artifacts import ArtifactStore
from paceline_experience.store.store import Store
from paceline_experience.store.watermarks import Watermarks
from paceline_experience.tenancy.quotas import Quotas
from paceline_harness.ledgers.episodes import FakeClock, made, make_spec
from paceline_harness.lifecycle.job_code import NotTried, TriedHere, close_code, job_code
from paceline_harness.patience import PATIENCE_S


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
