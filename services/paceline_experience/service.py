"""The experience service: everything about jobs, behind one port."""

from __future__ import annotations

import asyncio
import os
import time

from paceline.chassis import Chassis, Service
from paceline.config import ServiceSettings
from paceline.config.load import validate
from paceline.config.service import ExperienceOptions
from paceline.errors import ConfigError, PacelineError
from paceline.logs import Log
from paceline.metrics import Shown
from paceline.types import Job, Worker, WorkerKind
from paceline.v1.access_pb2_grpc import (
    add_AccessServicer_to_server,
    add_GatekeeperServicer_to_server,
)
from paceline.v1.experience_pb2_grpc import add_ExperienceServicer_to_server
from paceline.v1.jobs_pb2_grpc import add_JobsServicer_to_server
from paceline.v1.roster_pb2_grpc import add_RosterServicer_to_server
from paceline.v1.tenants_pb2_grpc import add_TenantsServicer_to_server
from paceline_experience.access.audit_log import AuditLog
from paceline_experience.access.servicer import AccessServicer, GatekeeperServicer
from paceline_experience.access.tokens import Tokens
from paceline_experience.artefacts import Artefacts
from paceline_experience.desk import Desk
from paceline_experience.dispatch import Dispatcher
from paceline_experience.dry_run import DryRun
from paceline_experience.experience_servicer import ExperienceServicer
from paceline_experience.flight import Flight
from paceline_experience.history import History
from paceline_experience.hooks import JobHooks
from paceline_experience.jobs import JobStore
from paceline_experience.jobs_servicer import JobsServicer
from paceline_experience.ledger import JobLedger
from paceline_experience.ledgers import Entry, Ledgers, sweep
from paceline_experience.meter import JobMeter
from paceline_experience.presence import Presence
from paceline_experience.quotas import Quotas
from paceline_experience.roster import Query, Roster
from paceline_experience.roster_servicer import RosterServicer
from paceline_experience.routes import CALM_S, Tracker
from paceline_experience.store import Store
from paceline_experience.tenant_gauges import values_of
from paceline_experience.tenants import Tenants
from paceline_experience.tenants_servicer import TenantsServicer
from paceline_experience.training import Training
from paceline_experience.vitals import Vitals
from paceline_experience.watch import Watch
from paceline_experience.watermarks import Watermarks

_LOOK_S = 1.0
_PATIENCE_S = 0.2  # that other jobs have with one
log = Log("experience")


class ExperienceService(Service):
    """Owns the connection to the store and one ledger for each live job."""

    def __init__(self, chassis: Chassis, *, store: Store, options: ExperienceOptions) -> None:
        self._settings = chassis.settings
        self._metrics = chassis.metrics
        self._address = chassis.address
        self._options = options
        self._store = store
        self._jobs = JobStore(store, limits=self._settings.limits)
        self._audit = AuditLog(
            store,
            path=self._settings.run_dir / "audit" / f"{self._settings.worker_id}.jsonl",
            most=options.audit_entries,
        )
        self._artefacts = Artefacts(store)
        self._history = History(store, self._settings.run_dir)
        self._quotas = Quotas(self._settings.limits)
        self._roster = Roster(lease_s=options.member_lease_s)
        dry_run = DryRun(timeout_s=options.plugins_s, memory_bytes=options.plugins_bytes)
        self._dry_run = dry_run
        self._ledgers = Ledgers(
            store=store,
            jobs=self._jobs,
            history=self._history,
            hooks=self._hooks,
            opened=self._opened,
            options=options,
            owner=self._settings.worker_id,
            quotas=self._quotas,
            watermarks=self._watermarks,
            tracer=chassis.tracer,
            meter=self._meter,
            dry_run=dry_run,
        )
        self._watch = Watch(
            self._metrics,
            usage=chassis.usage,
            jobs=self._jobs,
            ledgers=self._ledgers,
            roster=self._roster,
            store=store,
            audit_s=options.audit_s,
        )
        store.usage = chassis.usage
        self._gauges = Shown(self._metrics)
        self._flight = Flight(self._ledgers)
        self._presence = Presence(self._ledgers, return_s=options.lease_return_s)
        self._tenants = Tenants(
            store=store,
            jobs=self._jobs,
            ledgers=self._ledgers,
            roster=self._roster,
            flight=self._flight,
            quotas=self._quotas,
        )
        self._tracker = Tracker(self._roster)
        self._desk = Desk(
            jobs=self._jobs,
            artefacts=self._artefacts,
            history=self._history,
            ledgers=self._ledgers,
            tracker=self._tracker,
            quotas=self._quotas,
            dry_run=dry_run,
        )
        self._training = Training(
            jobs=self._jobs,
            ledgers=self._ledgers,
            tracker=self._tracker,
            export=self._desk.export,
        )
        self._add_servicers(chassis)

    def _watermarks(self, job_id: str) -> Watermarks:
        return Watermarks(self._settings.run_dir / "watermarks" / f"{job_id}.json")

    async def start(self) -> None:
        """Open the ledgers of all live jobs."""
        await self._jobs.mend()
        await self._ledgers.open_all()
        await self._tenants.look()
        log.info("open", jobs=len(self._ledgers.active))

    async def run(self) -> None:
        """Look after leases, evals, members and the ownership of jobs."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_members(), name="members")
            tasks.create_task(self._keep(), name="keep")
            tasks.create_task(self._open(), name="open")
            tasks.create_task(self._sweep(tasks), name="sweep")
            tasks.create_task(self._follow_roster(), name="roster")
            tasks.create_task(self._vitals.run(), name="vitals")
            tasks.create_task(self._watch.run(), name="watch")
            tasks.create_task(self._watch.follow(), name="look")
            tasks.create_task(self._watch.audit(), name="audit")

    async def _follow_members(self) -> None:
        """Waits for nothing: to the roster, a look that comes late says that nothing ran."""
        while True:
            self._roster.join(self._worker())
            for worker in self._roster.expire():
                self._presence.lost(worker.worker_id)
            await asyncio.sleep(min(self._options.sweep_s, _LOOK_S))

    async def _keep(self) -> None:
        """Stay the owner of jobs, and hand out again what absent workers have."""
        while True:
            try:
                await self._ledgers.renew()
            except PacelineError as error:
                log.warning("cannot renew the ownership of jobs", error=error)
            await self._presence.sweep()
            await asyncio.sleep(self._options.sweep_s)

    async def _open(self) -> None:
        """Plug-ins of a job may take long to try; nothing else waits for it."""
        while True:
            try:
                await self._ledgers.complete()
            except PacelineError as error:
                log.warning("cannot open jobs", error=error)
            await asyncio.sleep(self._options.sweep_s)

    async def _sweep(self, tasks: asyncio.TaskGroup) -> None:
        """Look after one job after the other; one that takes long goes on beside the others."""
        slow: set[str] = set()
        while True:
            for job_id, entry in list(self._ledgers.active.items()):
                if job_id in slow:
                    continue
                task = tasks.create_task(self._look_after(job_id, entry), name="look after")
                done, _ = await asyncio.wait({task}, timeout=_PATIENCE_S)
                if not done:
                    slow.add(job_id)
                    task.add_done_callback(lambda _, job_id=job_id: slow.discard(job_id))
            await self._look_at_tenants()
            await asyncio.sleep(self._options.sweep_s)

    async def _look_after(self, job_id: str, entry: Entry) -> None:
        await sweep(entry)
        self._tracker.hold(job_id, await entry.ledger.hold())  # an eval may be over

    async def _follow_roster(self) -> None:
        """Tell the tracker, and every ledger which versions its rollout workers answer with."""
        async for _ in self._roster.changed.waves(CALM_S):
            self._tracker.sync()
            for job_id, entry in list(self._ledgers.active.items()):
                workers = self._roster.workers(Query(job_id=job_id, kind=WorkerKind.ROLLOUT))
                entry.ledger.serve(w.active_version for w in workers if w.job_id == job_id)

    async def close(self) -> None:
        """Let go of ledgers and store."""
        await self._training.close()
        await self._ledgers.close()
        await self._dry_run.close()
        self._audit.close()
        await self._store.close()

    async def _look_at_tenants(self) -> None:
        try:
            self._gauges.show(values_of(await self._tenants.look()))
        except PacelineError as error:
            log.warning("cannot look at tenants; quotas stay as they were", error=error)

    def _worker(self) -> Worker:
        return Worker(
            worker_id=self._settings.worker_id,
            kind=WorkerKind.EXPERIENCE,
            endpoint=self._address,
            site=self._settings.site,
            load={"cpu_s": time.process_time()},
            pid=os.getpid(),
        )

    def _meter(self, job_id: str) -> JobMeter:
        return self._watch.meter(job_id)

    def _hooks(self, job: Job) -> JobHooks:
        return JobHooks(
            job=job, jobs=self._jobs, history=self._history, conclude=self._desk.conclude
        )

    async def _opened(self, job: Job, ledger: JobLedger) -> None:
        await self._training.restore(job, held=await ledger.hold())

    def _add_servicers(self, chassis: Chassis) -> None:
        jobs = JobsServicer(
            desk=self._desk,
            jobs=self._jobs,
            ledgers=self._ledgers,
            tracker=self._tracker,
            audit=self._audit,
        )
        tokens = Tokens(self._store, self._audit)
        experience = ExperienceServicer(
            desk=self._desk,
            ledgers=self._ledgers,
            dispatcher=Dispatcher(
                self._ledgers, flight=self._flight, limits=self._tenants, presence=self._presence
            ),
            training=self._training,
            artefacts=self._artefacts,
        )
        self._vitals = Vitals(
            self._store,
            samples=lambda: experience.num_submitted,
            within_s=chassis.settings.probes.answer_s,
        )
        self._vitals.register(chassis.health.progress)
        roster = RosterServicer(
            roster=self._roster,
            tracker=self._tracker,
            training=self._training,
            live_jobs=lambda: list(self._ledgers.active),
        )
        add_JobsServicer_to_server(jobs, chassis.server)
        add_ExperienceServicer_to_server(experience, chassis.server)
        add_RosterServicer_to_server(roster, chassis.server)
        add_AccessServicer_to_server(
            AccessServicer(tokens=tokens, audit=self._audit), chassis.server
        )
        add_GatekeeperServicer_to_server(
            GatekeeperServicer(tokens=tokens, audit=self._audit), chassis.server
        )
        add_TenantsServicer_to_server(
            TenantsServicer(tenants=self._tenants, audit=self._audit), chassis.server
        )


async def build(chassis: Chassis) -> ExperienceService:
    """The service as its settings want it.

    Raises:
        StoreError: nothing answers at `store_url` within `store_wait_s`.
    """
    settings: ServiceSettings = chassis.settings
    if not settings.store_url:
        raise ConfigError("store_url: is empty; the experience service needs a redis:// URL")
    options = validate(ExperienceOptions, settings.options)
    store = await Store.connect(settings.store_url, wait_s=options.store_wait_s)
    return ExperienceService(chassis, store=store, options=options)
