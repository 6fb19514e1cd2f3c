"""The controller in a cluster: all replicas watch, the leader acts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

from kubernetes.aio.client.configuration import Configuration

from paceline.config.sections.kubernetes import KubernetesOptions
from paceline.config.service import ControllerOptions
from paceline.enums import JobState, WorkerKind
from paceline.errors import FencedError, PacelineError, UnavailableError
from paceline.front.api.tenants import Tenant
from paceline.platform.server.chassis import Chassis, Service
from paceline.platform.server.membership import Membership
from paceline.platform.telemetry.logs import Log
from paceline.platform.transport.rpc import connect, connect_as
from paceline.v1.experience_pb2_grpc import ExperienceStub
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline.v1.roster_pb2_grpc import RosterStub
from paceline.v1.tenants_pb2_grpc import TenantsStub
from paceline_controller.cluster.leader import Leader, LeaseTimes
from paceline_controller.cluster.leases import ClusterLeases
from paceline_controller.cluster.training_jobs import TrainingJobs
from paceline_controller.collaborators import JobRegistry
from paceline_controller.demand_source import GrpcDemandSource
from paceline_controller.jobs.costs import Costs
from paceline_controller.jobs.plan import LiveJob
from paceline_controller.jobs.progress import ProgressWatch
from paceline_controller.member import worker_of
from paceline_controller.reconciler import Reconciler
from paceline_controller.registry import GrpcJobRegistry
from paceline_controller.runtimes.kubernetes.connection import KubernetesClient, configuration
from paceline_controller.runtimes.kubernetes.events import Events, reference
from paceline_controller.runtimes.kubernetes.inventory import Inventory
from paceline_controller.runtimes.kubernetes.manifests import owner_reference
from paceline_controller.runtimes.kubernetes.resources import DEPLOYMENTS, TRAINING_JOBS, Object
from paceline_controller.runtimes.kubernetes.runtime import KubernetesRuntime
from paceline_controller.runtimes.kubernetes.states import incarnation_of
from paceline_controller.runtimes.kubernetes.watches import Cache
from paceline_controller.scaling.scaler import Scaler

log = Log("cluster")


class ClusterService(Service):
    """Pods outlive it: another replica, or its successor, takes over."""

    def __init__(self, chassis: Chassis, options: ControllerOptions, access: Configuration) -> None:
        settings = chassis.settings
        self._chassis = chassis
        self._options = options
        namespace = options.kubernetes.namespace
        self._connection = connection = KubernetesClient(access, namespace=namespace)
        self._acting = KubernetesClient(access, namespace=namespace, may_write=self._leads)
        self._leader: Leader | None = None
        self._reconciler: Reconciler | None = None
        self._training_jobs: TrainingJobs | None = None
        self._inventory = Inventory(connection, options.kubernetes, on_change=self._wake)
        self._objects = Cache(connection, TRAINING_JOBS, on_change=self._wake)
        self._events = Events(
            connection, identity=options.kubernetes.identity, regarding=self._regarding
        )
        self._channel = connect_as(settings, settings.experience)
        self._gateway = (
            connect(
                options.kubernetes.gateway,
                tls=settings.tls,
                kind=WorkerKind.GATEWAY,
                token=settings.token,
            )
            if options.kubernetes.gateway
            else connect_as(settings, settings.experience)
        )
        self._membership = Membership(
            roster=RosterStub(self._channel),
            report=partial(worker_of, chassis),
            usage=chassis.usage.totals,
        )

    async def run(self) -> None:
        """Watch, campaign for leadership, and act while leading."""
        times = lease_times(self._options.kubernetes)
        leases = ClusterLeases(
            self._connection,
            self._options.kubernetes.lease,
            lease_s=times.lease_s,
            owner=await self._owner(),
        )
        self._leader = leader = Leader(
            leases, identity=self._options.kubernetes.identity, times=times
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._membership.run(), name="membership")
            tasks.create_task(self._inventory.run(), name="inventory")
            tasks.create_task(self._events.run(), name="events")
            if self._options.kubernetes.training_jobs:
                tasks.create_task(self._objects.run(), name="training jobs")
            tasks.create_task(leader.run(self._lead), name="leader")

    async def drain(self) -> None:
        """Leave the roster; leadership was handed over when `run` ended."""
        await self._membership.leave()

    async def close(self) -> None:
        """End all connections."""
        await self._acting.close()
        await self._connection.close()
        await self._channel.close()
        await self._gateway.close()

    async def _lead(self) -> None:
        """One term as leader; all state comes from the cluster and the ledger."""
        experience = ExperienceStub(self._channel)
        ledger = GrpcJobRegistry(
            jobs=JobsStub(self._channel),
            experience=experience,
            tenants=TenantsStub(self._channel),
        )
        runtime = KubernetesRuntime(
            self._acting,
            self._options.kubernetes,
            inventory=self._inventory,
            events=self._events,
            credentials=ledger,
        )
        source = GrpcDemandSource(roster=RosterStub(self._channel), experience=experience)
        scaler = Scaler(source=source, options=self._options, metrics=self._chassis.metrics)
        costs = Costs(self._chassis.metrics, self._options)
        progress = ProgressWatch(source=source, metrics=self._chassis.metrics)
        self._reconciler = Reconciler(
            ledger=LedgerOfTerm(ledger, self._events, may_write=self._leads),
            runtime=runtime,
            options=self._options,
            child_grace_s=self._chassis.settings.grace_s,
            reason_bytes=self._chassis.settings.limits.reason_bytes,
            sizing=scaler,
            costs=costs,
            progress=progress,
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._reconciler.run(), name="reconciler")
                tasks.create_task(runtime.maintain(), name="tend")
                if self._options.kubernetes.training_jobs:
                    self._training_jobs = self._make_training_jobs(runtime)
                    tasks.create_task(self._training_jobs.run(), name="training jobs")
        finally:
            await self._reconciler.halt()
            scaler.close()
            costs.close()
            progress.close()
            self._reconciler = self._training_jobs = None

    def _make_training_jobs(self, runtime: KubernetesRuntime) -> TrainingJobs:
        return TrainingJobs(
            api=self._acting,
            cache=self._objects,
            gateway=JobsStub(self._gateway),
            workers=runtime,
            events=self._events,
        )

    def _leads(self) -> bool:
        return self._leader is not None and self._leader.acting

    def _wake(self) -> None:
        if self._reconciler is not None:
            self._reconciler.wake()
        if self._training_jobs is not None:
            self._training_jobs.wake()

    async def _owner(self) -> Object | None:
        """The controller's Deployment, which owns the lease; None: it does not run as one."""
        try:
            deployment = await self._connection.get(DEPLOYMENTS, self._options.kubernetes.owner)
        except PacelineError as error:
            log.warning(
                "the lease has no owner", deployment=self._options.kubernetes.owner, error=error
            )
            return None
        return owner_reference(deployment, DEPLOYMENTS)

    def _regarding(self, job_id: str) -> Object | None:
        """The TrainingJob of a job, else its trainer, else the controller itself."""
        try:
            subject = self._training_job(job_id) if job_id else None
            trainers = self._inventory.trainer_jobs().get(f"trainer-{job_id}")
            if subject is None and job_id and trainers:
                subject = max(trainers, key=incarnation_of)
            subject = subject or self._inventory.deployments.find(self._options.kubernetes.owner)
        except UnavailableError:
            return None
        return reference(subject) if subject else None

    def _training_job(self, job_id: str) -> Object | None:
        try:
            objects = self._objects.objects()
        except UnavailableError:  # there may be no such kind in this cluster
            return None
        return next(
            (body for body in objects if (body.get("status") or {}).get("jobId") == job_id), None
        )


async def build(chassis: Chassis, options: ControllerOptions) -> Service:
    """A service that is connected to its cluster."""
    return ClusterService(chassis, options, await configuration(options.kubernetes.kubeconfig))


def lease_times(options: KubernetesOptions) -> LeaseTimes:
    """A leader acts for two thirds of the lease and renews it every seventh."""
    return LeaseTimes(
        lease_s=options.lease_s,
        renew_within_s=options.lease_s * 2 / 3,
        retry_s=options.lease_s / 7,
    )


class LedgerOfTerm:
    """A ledger that refuses calls once this process no longer leads; failures become events.

    Otherwise a process that was frozen could replace the trainer that its successor started.
    """

    def __init__(
        self, ledger: JobRegistry, events: Events, *, may_write: Callable[[], bool]
    ) -> None:
        self._ledger = ledger
        self._events = events
        self._may_write = may_write

    async def live_jobs(self) -> list[LiveJob]:
        """All jobs that are not over."""
        return await self._ledger.live_jobs()

    async def tenants(self) -> Mapping[str, Tenant]:
        """Quota and usage of each tenant."""
        return await self._ledger.tenants()

    async def grant_incarnation(self, job_id: str) -> int:
        """Number the next start of a trainer; raises `FencedError` if another leads."""
        self._check("grant_incarnation", job_id)
        return await self._ledger.grant_incarnation(job_id)

    async def report_failure(self, job_id: str, reason: str) -> tuple[int, str]:
        """An incarnation has failed; raises `FencedError` if another leads."""
        self._check("report_failure", job_id)
        return await self._ledger.report_failure(job_id, reason)

    async def set_state(self, job_id: str, state: JobState, *, reason: str = "") -> None:
        """Move a job to another state; raises `FencedError` if another leads."""
        self._check("set_state", job_id)
        await self._ledger.set_state(job_id, state, reason=reason)
        if state is JobState.FAILED:
            self._events.record(job_id, "GaveUp", reason, warning=True)

    def _check(self, what: str, job_id: str) -> None:
        if not self._may_write():
            raise FencedError(f"{what} {job_id}: another controller leads")
