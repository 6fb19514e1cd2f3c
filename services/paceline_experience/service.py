"""The experience service: everything about jobs, behind one port."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable

from paceline.config import ServiceSettings
from paceline.config.load import validate
from paceline.config.service import ExperienceOptions
from paceline.enums import WorkerKind
from paceline.errors import ConfigError, PacelineError
from paceline.isolation.code.packages import Packages
from paceline.platform.fair_queue import QueueOwner
from paceline.platform.server.chassis import Chassis, Service
from paceline.platform.telemetry.logs import Log
from paceline.platform.telemetry.metrics import GaugeSet
from paceline.platform.transport.rpc_authorization import RefusedCallers
from paceline.types import Job, Worker
from paceline_experience.api.access import AccessServicer, AuthenticationServicer
from paceline_experience.api.credentials import Credentials
from paceline_experience.api.experience import ExperienceServicer
from paceline_experience.api.jobs import JobsServicer
from paceline_experience.api.roster import RosterServicer
from paceline_experience.api.servicers import add_servicers
from paceline_experience.api.tenants import TenantsServicer
from paceline_experience.dispatch.dispatch import Dispatcher
from paceline_experience.dispatch.presence import Presence
from paceline_experience.dispatch.slots import SlotAccounting
from paceline_experience.fleet.roster import Query, Roster
from paceline_experience.fleet.routes import DEBOUNCE_S, RoutePlanner
from paceline_experience.jobs.deletion import SETTLE_S, Deletion
from paceline_experience.jobs.dry_run import DryRun
from paceline_experience.jobs.forks.forking import Forking
from paceline_experience.jobs.history import History
from paceline_experience.jobs.hooks import JobHooks
from paceline_experience.jobs.job_files import JobFiles
from paceline_experience.jobs.jobs import JobStore
from paceline_experience.jobs.ledgers import RETRY_S, Ledgers, OpenLedger, sweep
from paceline_experience.jobs.metrics import JobMetricsCollector
from paceline_experience.jobs.opening.job_code import make_job_code
from paceline_experience.jobs.opening.opener import LedgerOpener
from paceline_experience.jobs.opening.sweeps import sweep_all
from paceline_experience.jobs.pausing import Pausing
from paceline_experience.jobs.service import JobService
from paceline_experience.jobs.submit.in_flight import InFlight
from paceline_experience.jobs.submit.pipeline import JobSubmitter, checks_of
from paceline_experience.jobs.submit.uploads import Uploads
from paceline_experience.jobs.training import Training
from paceline_experience.ledger.ledger import JobLedger
from paceline_experience.liveness import StoreLiveness
from paceline_experience.store.artifacts import ArtifactStore
from paceline_experience.store.clock import JobClock
from paceline_experience.store.store import Store
from paceline_experience.store.watermarks import Watermarks
from paceline_experience.tenancy.audit_log import AuditLog
from paceline_experience.tenancy.quotas import Quotas
from paceline_experience.tenancy.tokens import Tokens
from paceline_experience.usage.activity import ActivityMonitor
from paceline_experience.usage.gauges import values_of
from paceline_experience.usage.tenants import Tenants
from paceline_experience.webhooks.outbox import Webhooks
from paceline_experience.webhooks.sender import WebhookSender

_MEMBERS_INTERVAL_S = 1.0
# What a crash has left undone, and what other replicas have done, is looked for so often.
_RECORDS_SWEEPS = 2
_WEBHOOKS_INTERVAL_S = 1.0
log = Log("experience")


class ExperienceService(Service):
    """Owns the connection to the store and one ledger for each live job."""

    def __init__(
        self,
        chassis: Chassis,
        *,
        store: Store,
        options: ExperienceOptions,
        dry_run: DryRun,
        sweep: Callable[[OpenLedger], Awaitable[None]] = sweep,
        retry_s: float = RETRY_S,
        settle_s: float = SETTLE_S,
    ) -> None:
        """`dry_run` is closed with the service. `sweep` is called with each ledger every `sweep_s`.

        `retry_s`: until a job that could not be opened is tried again; `settle_s`: how long workers
        have to join the roster before it is believed that a job has none.
        """
        settings = self._settings = chassis.settings
        self._metrics = chassis.metrics
        self._address = chassis.address
        self._usage = chassis.usage
        self._options = options
        self._store = store
        self._sweep = sweep
        self._jobs = JobStore(store, limits=settings.limits, allowed=settings.plugins.targets)
        audit = settings.run_dir / "audit" / f"{settings.worker_id}.jsonl"
        self._audit = AuditLog(store, path=audit, max_entries=options.max_audit_entries)
        self._artifacts = ArtifactStore(store)
        self._history = History(store, settings.run_dir)
        self._quotas = Quotas(settings.limits)
        self._uploads = Uploads(artifacts=self._artifacts, quotas=self._quotas)
        self._roster = Roster(lease_s=options.member_lease_s)
        self._dry_run = dry_run
        self._code = make_job_code(
            self._jobs,
            self._artifacts,
            options=options,
            dry_run=dry_run,
            packages=Packages(settings.packages, metrics=self._metrics),
            metrics=self._metrics,
        )
        self._ledgers = self._make_ledgers(chassis, retry_s)
        self._collector = self._make_collector()
        store.usage = chassis.usage
        self._gauges = GaugeSet(self._metrics)
        self._accounting = SlotAccounting(self._ledgers)
        self._presence = Presence(self._ledgers, return_s=options.lease_return_s)
        self._tenants = Tenants(
            store=store,
            jobs=self._jobs,
            ledgers=self._ledgers,
            roster=self._roster,
            accounting=self._accounting,
            quotas=self._quotas,
        )
        self._tracker = RoutePlanner(self._roster)
        self._files = JobFiles(settings.run_dir, storage=settings.storage)
        self._pausing = Pausing(jobs=self._jobs, ledgers=self._ledgers, history=self._history)
        self._in_flight = InFlight()
        self._job_service = self._make_job_service()
        self._deletion = self._make_deletion(settle_s)
        self._training = Training(
            jobs=self._jobs,
            ledgers=self._ledgers,
            tracker=self._tracker,
            export=self._job_service.export,
        )
        self._add_servicers(chassis)

    def _make_collector(self) -> JobMetricsCollector:
        return JobMetricsCollector(
            self._metrics,
            usage=self._usage,
            jobs=self._jobs,
            ledgers=self._ledgers,
            roster=self._roster,
            store=self._store,
            verify_interval_s=self._options.verify_interval_s,
        )

    def _make_ledgers(self, chassis: Chassis, retry_s: float) -> Ledgers:
        return Ledgers(
            store=self._store,
            jobs=self._jobs,
            history=self._history,
            opener=LedgerOpener(
                store=self._store,
                options=self._options,
                quotas=self._quotas,
                hooks=self._hooks,
                tracer=chassis.tracer,
                meter=lambda job_id: self._collector.meter(job_id),
                new_clock=lambda: JobClock(self._store.now),
            ),
            code=self._code,
            opened=self._opened,
            watermarks=self._watermarks,
            options=self._options,
            owner=self._settings.worker_id,
            retry_s=retry_s,
        )

    def _make_job_service(self) -> JobService:
        submitter = JobSubmitter(
            jobs=self._jobs,
            artifacts=self._artifacts,
            history=self._history,
            ledgers=self._ledgers,
            quotas=self._quotas,
            forking=Forking(
                store=self._store,
                jobs=self._jobs,
                files=self._files,
                compress_over_bytes=self._options.compress_over_bytes,
            ),
            checks=checks_of(self._code, self._uploads.names_of),
            in_flight=self._in_flight,
        )
        return JobService(
            submitter=submitter,
            pausing=self._pausing,
            jobs=self._jobs,
            artifacts=self._artifacts,
            history=self._history,
            ledgers=self._ledgers,
            tracker=self._tracker,
            quotas=self._quotas,
        )

    def _make_deletion(self, settle_s: float) -> Deletion:
        return Deletion(
            store=self._store,
            jobs=self._jobs,
            ledgers=self._ledgers,
            artifacts=self._artifacts,
            job_service=self._job_service,
            roster=self._roster,
            files=self._files,
            settle_s=settle_s,
        )

    def _live_code(self) -> dict[QueueOwner, str]:
        """The code of live jobs."""
        live = [(job_id, each.spec) for job_id, each in self._ledgers.active.items()]
        return {
            QueueOwner(spec.tenant, job_id): spec.code.digest
            for job_id, spec in live
            if spec.code is not None
        }

    def _watermarks(self, job_id: str) -> Watermarks:
        return Watermarks(self._settings.run_dir / "watermarks" / f"{job_id}.json")

    async def start(self) -> None:
        """Open the ledgers of all live jobs."""
        if self._options.read_only:
            return
        await self._deletion.abandon(await self._jobs.repair())
        await self._ledgers.open_all()
        await self._tenants.refresh()
        log.info("open", jobs=len(self._ledgers.active))

    async def run(self) -> None:
        """Sweep leases, evals and members, and keep the ownership of jobs."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_members(), name="members")
            tasks.create_task(self._liveness.run(), name="liveness")
            if self._options.read_only:
                return
            tasks.create_task(self._keep_ownership(), name="ownership")
            sweeps = sweep_all(self._ledgers, self._sweep_job, tasks, every_s=self._options.sweep_s)
            tasks.create_task(sweeps, name="sweep")
            for each in self._repeated():
                tasks.create_task(self._repeat(*each))
            tasks.create_task(self._code.own_tasks.follow(self._live_code), name="packages")
            tasks.create_task(self._follow_roster(), name="roster")
            tasks.create_task(self._code.own_functions.sweep(), name="own functions")
            tasks.create_task(self._collector.run_waits(), name="waits")
            tasks.create_task(self._collector.run_collect(), name="collect")
            tasks.create_task(self._collector.run_verify(), name="verify")

    def _repeated(self) -> list[tuple[Callable[[], Awaitable[object]], str, float]]:
        """What is done over and over, what to log when it fails, and seconds in between."""
        sweep_s = self._options.sweep_s
        repair_s = _RECORDS_SWEEPS * sweep_s
        return [
            (self._ledgers.open_missing, "cannot open jobs", sweep_s),
            (self._pausing.repair, "cannot follow the records of jobs", repair_s),
            (self._show_tenants, "cannot refresh tenants; quotas stay as they were", repair_s),
            (self._deletion.sweep, "cannot look for jobs to delete", 2 * repair_s),
            (self._webhooks.sweep, "cannot look for webhooks", _WEBHOOKS_INTERVAL_S),
        ]

    async def _follow_members(self) -> None:
        """Awaits nothing else: the roster takes a late call for a frozen process."""
        while True:
            me = self._worker()
            self._roster.join(me)
            self._roster.beat(me.worker_id, load=me.load, usage=self._usage.totals())
            for worker in self._roster.expire():
                self._presence.lost(worker.worker_id)
            await asyncio.sleep(min(self._options.sweep_s, _MEMBERS_INTERVAL_S))

    async def _keep_ownership(self) -> None:
        """Renew the ownership of jobs, and requeue the leases of absent workers."""
        while True:
            try:
                await self._ledgers.renew()
            except PacelineError as error:
                log.warning("cannot renew the ownership of jobs", error=error)
            await self._presence.sweep()
            await asyncio.sleep(self._options.sweep_s)

    async def _repeat(
        self, step: Callable[[], Awaitable[object]], failing: str, interval_s: float
    ) -> None:
        """Do something over and over, in a task of its own, so that it may take long."""
        while True:
            try:
                await step()
            except PacelineError as error:
                log.warning(failing, error=error)
            await asyncio.sleep(interval_s)

    async def _sweep_job(self, entry: OpenLedger) -> None:
        await self._sweep(entry)
        job_id, ledger = entry.job.status.job_id, entry.ledger
        await self._training.judge(job_id, ledger)
        self._tracker.hold(job_id, ledger.evals.held_version())  # an eval may be over

    async def _follow_roster(self) -> None:
        """Pass roster changes to the route planner, and served versions to every ledger."""
        async for _ in self._roster.changed.debounced(DEBOUNCE_S):
            self._tracker.sync()
            for job_id, entry in list(self._ledgers.active.items()):
                workers = self._roster.workers(Query(job_id=job_id, kind=WorkerKind.ROLLOUT))
                entry.ledger.serve(w.active_version for w in workers if w.job_id == job_id)

    async def close(self) -> None:
        """Close ledgers and store."""
        await self._in_flight.close()
        await self._webhooks.close()
        await self._deletion.close()
        await self._training.close()
        await self._ledgers.close()
        await self._dry_run.close()
        await self.release()
        await self._store.close()

    async def release(self) -> None:
        """Free what the system frees of a process that is killed: files, threads and children."""
        self._audit.close()
        await self._deletion.close()
        await self._code.close()

    async def _show_tenants(self) -> None:
        self._gauges.show(values_of(await self._tenants.refresh()))

    def _worker(self) -> Worker:
        return Worker(
            worker_id=self._settings.worker_id,
            kind=WorkerKind.EXPERIENCE,
            endpoint=self._address,
            site=self._settings.site,
            load={"cpu_s": time.process_time()},
            pid=os.getpid(),
        )

    def _hooks(self, job: Job, main_eval: str | None) -> JobHooks:
        return JobHooks(
            job=job,
            main_eval=main_eval,
            jobs=self._jobs,
            history=self._history,
            conclude=self._job_service.conclude,
        )

    async def _opened(self, job: Job, ledger: JobLedger) -> None:
        if names := job.status.unlisted:
            log.warning("functions that are not listed", job=job.status.job_id, names=names)
        await self._training.restore(job, held=ledger.evals.held_version())

    def _add_servicers(self, chassis: Chassis) -> None:
        settings = self._options.webhooks
        sender = WebhookSender(origins=settings.origins, timeout_s=settings.timeout_s)
        self._webhooks = Webhooks(store=self._store, settings=settings, sender=sender)
        jobs = JobsServicer(
            job_service=self._job_service,
            pausing=self._pausing,
            uploads=self._uploads,
            jobs=self._jobs,
            ledgers=self._ledgers,
            tracker=self._tracker,
            audit=self._audit,
            deletion=self._deletion,
            webhooks=self._webhooks,
            artifacts=self._artifacts,
            activity=ActivityMonitor(
                jobs=self._jobs,
                ledgers=self._ledgers,
                roster=self._roster,
                collector=self._collector,
            ),
        )
        tokens = Tokens(self._store, self._audit)
        credentials = Credentials(
            jobs=self._jobs,
            ledgers=self._ledgers,
            roster=self._roster,
            watermarks=self._watermarks,
            refusals=RefusedCallers(self._metrics),
        )
        chassis.authorize(credentials.check)
        experience = ExperienceServicer(
            job_service=self._job_service,
            ledgers=self._ledgers,
            dispatcher=Dispatcher(
                self._ledgers,
                accounting=self._accounting,
                quotas=self._tenants,
                presence=self._presence,
            ),
            training=self._training,
            artifacts=self._artifacts,
            credentials=credentials,
        )
        self._liveness = StoreLiveness(
            self._store,
            samples=lambda: experience.num_submitted,
            within_s=chassis.settings.probes.answer_s,
        )
        self._liveness.register(chassis.health.progress)
        roster = RosterServicer(
            roster=self._roster,
            tracker=self._tracker,
            training=self._training,
            ended_jobs=self._job_service.ended,
        )
        add_servicers(
            chassis.server,
            jobs=jobs,
            experience=experience,
            roster=roster,
            access=AccessServicer(tokens=tokens, audit=self._audit),
            authentication=AuthenticationServicer(tokens=tokens, audit=self._audit),
            tenants=TenantsServicer(tenants=self._tenants, audit=self._audit),
        )


async def build(chassis: Chassis) -> ExperienceService:
    """Build the service from its settings.

    Raises:
        StoreError: nothing answers at `store_url` within `store_wait_s`.
    """
    settings: ServiceSettings = chassis.settings
    if not settings.store_url:
        raise ConfigError("store_url: is empty; the experience service needs a redis:// URL")
    options = validate(ExperienceOptions, settings.options)
    store = await Store.connect(settings.store_url, wait_s=options.store_wait_s)
    dry_run = DryRun(timeout_s=options.plugins_s, memory_bytes=options.plugins_bytes)
    return ExperienceService(chassis, store=store, options=options, dry_run=dry_run)
