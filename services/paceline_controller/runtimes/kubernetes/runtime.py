"""Workloads as pods: starts, finds, scales and ends them through the Kubernetes API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable

from paceline.config.sections.kubernetes import KubernetesOptions
from paceline.enums import WorkerKind
from paceline.errors import (
    ConflictError,
    DeadlineError,
    InvalidError,
    NotFoundError,
    PacelineError,
    PermissionDeniedError,
)
from paceline.platform.server.failures import marked
from paceline.platform.telemetry.logs import Log
from paceline.platform.transport.rpc import backoff_s
from paceline_controller.jobs.observed import Observed
from paceline_controller.jobs.plan import Wanted
from paceline_controller.runtimes.base import CredentialIssuer
from paceline_controller.runtimes.kubernetes import names, states
from paceline_controller.runtimes.kubernetes.admission import waits_for_admission
from paceline_controller.runtimes.kubernetes.connection import KubernetesClient
from paceline_controller.runtimes.kubernetes.events import Events
from paceline_controller.runtimes.kubernetes.inventory import Inventory
from paceline_controller.runtimes.kubernetes.manifests import (
    CONTAINER,
    ManifestContext,
    build,
    credential_name,
    credential_of,
    digest,
    owner_reference,
)
from paceline_controller.runtimes.kubernetes.ownership import released
from paceline_controller.runtimes.kubernetes.quarantine import Quarantine
from paceline_controller.runtimes.kubernetes.readiness import ReadinessDeadline
from paceline_controller.runtimes.kubernetes.resources import (
    DEPLOYMENTS,
    NETWORK_POLICIES,
    PODS,
    SECRETS,
    SERVICES,
    Kind,
    Object,
    annotations_of,
    deleting,
    name_of,
    uid_of,
)
from paceline_controller.runtimes.kubernetes.templates import load_template

MAINTAIN_INTERVAL_S = 5.0
# Above what any pod gets to drain; then the start or stop is tried again.
GONE_S = 900.0
LOG_LINES = 30
# A pass waits for the last words of what has died; the exit code alone says much of it.
LOG_S = 3.0
NOT_READY = "its pods run and are not ready"
log = Log("kubernetes")


class KubernetesRuntime:
    """A `Runtime` of Deployments and Jobs in one namespace.

    It keeps nothing that a new controller could not read from the cluster. Whether a process
    hangs is judged by the kubelet and its probes, so what is not ready is `pending`; a Job that
    has failed, containers that crash again and again, and the end of all patience are deaths.
    """

    def __init__(
        self,
        connection: KubernetesClient,
        options: KubernetesOptions,
        *,
        inventory: Inventory,
        events: Events,
        credentials: CredentialIssuer,
        clock: Callable[[], float] = time.monotonic,
        gone_s: float = GONE_S,
        log_s: float = LOG_S,
    ) -> None:
        self._connection = connection
        self._options = options
        self._inventory = inventory
        self._events = events
        self._credentials = credentials
        self._gone_s = gone_s
        self._log_s = log_s
        self._quarantine = Quarantine(connection, inventory=inventory, events=events)
        self._readiness = ReadinessDeadline(options.pending_timeout_s, clock=clock)
        self._observed: dict[str, Observed] = {}
        self._words: dict[str, str] = {}  # of the last life of each workload
        self._refused: dict[str, tuple[str, str]] = {}  # workload -> job, words of the cluster
        self._waiting: dict[str, str] = {}  # job, or empty for shared pools -> why
        self._owner: Object | None = None  # an entry of `ownerReferences`
        self._reported: set[str] = set()  # pods whose end was told

    def units(self, wanted: Iterable[Wanted]) -> list[Wanted]:
        """Whole workloads; shared pools only where the chart has them.

        What was said of others is forgotten: some were refused and never there to be stopped.
        """
        kept = [
            workload
            for workload in wanted
            if workload.job_id or workload.name in self._options.pools
        ]
        known = {unit.name for unit in kept}
        self._words = {n: words for n, words in self._words.items() if n in known}
        self._refused = {n: refusal for n, refusal in self._refused.items() if n in known}
        return kept

    async def list(self) -> list[Observed]:
        """The objects that the cluster has reported.

        Raises:
            UnavailableError: that was too long ago to act on it.
        """
        pods = self._inventory.pods_by_workload()
        self._waiting = {}
        observed: list[Observed] = []
        for pool, body in self._inventory.pools().items():
            members = self._inventory.pods_of(body)
            seen = states.of_deployment(body, members, name=pool)
            observed.append(self._judge(seen, members, states.refused(body)))
        for body in self._inventory.rollouts():
            workload = names.workload_of(body)
            seen = states.of_deployment(body, pods[workload])
            queued = waits_for_admission(body, pods[workload])
            observed.append(self._judge(seen, pods[workload], states.refused(body), queued))
        for workload, bodies in self._inventory.trainer_jobs().items():
            seen = states.of_trainer(bodies, pods[workload])
            newest = max(bodies, key=states.incarnation_of)
            refused = self._refusal(newest, pods[workload])
            queued = waits_for_admission(newest, pods[workload])
            observed.append(self._judge(seen, pods[workload], refused, queued))
        for job_id, words in self._quarantine.words().items():
            self._waiting.setdefault(job_id, words)
        self._observed = {process.name: process for process in observed}
        return observed

    async def start(self, wanted: Wanted, *, incarnation: int) -> None:
        """Apply its objects; earlier incarnations of a trainer are gone before the next exists.

        Raises:
            PacelineError: the cluster refused, or an earlier life does not end.
        """
        if not wanted.job_id:
            await self.scale(wanted.name, wanted.replicas)
            return
        again = wanted.name in self._words or wanted.name in self._observed
        if wanted.kind is WorkerKind.TRAINER:
            await self._clear_trainer(wanted.name)
        elif (old := self._inventory.rollout(wanted.name)) and deleting(old):
            await self._wait_until_gone(DEPLOYMENTS, wanted.name, old)
        try:
            await self._apply(wanted, incarnation)
        except (InvalidError, PermissionDeniedError) as error:
            self._words[wanted.name] = error.message
            self._refused[wanted.name] = (wanted.job_id, error.message)
            if self._inventory.rollout(wanted.name) is None:
                # Nobody looks later at the objects that were applied before the refusal.
                await self._delete_beside(wanted.name, wanted.kind)
            raise
        self._refused.pop(wanted.name, None)
        words = self._words.get(wanted.name, "")
        note = f"{wanted.name}: incarnation {incarnation}" if incarnation else wanted.name
        self._events.record(
            wanted.job_id,
            "Restarted" if again else "Started",
            f"{note}; before: {words}" if words else note,
            warning=again,
        )

    async def stop(self, name: str, *, grace_s: float) -> None:
        """Delete it and wait until its pods are gone; they have the grace of their template."""
        if name in self._options.pools:
            await self.scale(name, 0)
            return
        if (body := self._inventory.rollout(name)) is not None:
            await self._delete_beside(name, WorkerKind.ROLLOUT)
            await self._connection.delete(DEPLOYMENTS, name_of(body), uid=uid_of(body))
            await self._wait_until_gone(DEPLOYMENTS, name, body)
        else:
            # Before the Job, so that nobody forgets them when this is cut off in between.
            await self._delete_beside(name, WorkerKind.TRAINER)
            await self._clear_trainer(name)
        self._words.pop(name, None)
        self._refused.pop(name, None)
        self._readiness.forget(name)
        log.info("stopped", workload=name)

    async def scale(self, name: str, replicas: int) -> None:
        """Change the replicas of a Deployment, and nothing else of it."""
        pool = self._inventory.pools().get(name)
        body = pool or self._inventory.rollout(name)
        if body is None:
            raise NotFoundError(f"kubernetes: there is no Deployment of {name}")
        changes = {"spec": {"replicas": replicas}}
        changed = await self._connection.patch(DEPLOYMENTS, name_of(body), changes)
        self._learn(changed)
        if pool:
            await self._release(changed)
        job_id = "" if pool else names.wanted_of(body).job_id
        before = body["spec"].get("replicas", 1)
        if before != replicas:
            self._events.record(job_id, "Scaled", f"{name}: from {before} to {replicas} replicas")

    async def ready(self, name: str) -> bool:
        """Whether its pods pass their readiness probes; a pool without replicas is ready."""
        process = self._observed.get(name)
        return process is not None and (process.ready > 0 or process.replicas == 0)

    async def last_words(self, name: str) -> str:
        """Why it ended or waits, and the end of its output."""
        return await self._words_now(name) or self._words.get(name, "it left no words")

    async def close(self) -> None:
        """Nothing is held; pods live on."""

    def waits_for(self, job_id: str) -> str:
        """The reason why workloads of a job did not run at the last `list`; empty if they did."""
        not_taken = [words for owner, words in self._refused.values() if owner == job_id]
        reasons = (self._waiting.get(job_id), *not_taken, self._waiting.get(""))
        return next((words for words in reasons if words), "")

    def rollouts_of(self, job_id: str) -> int:
        """Rollout workers of a job that answer."""
        pods = self._inventory.of_job(job_id)
        return sum(
            states.is_ready(pod)
            for pod in pods
            if pod["metadata"]["labels"][names.COMPONENT] == WorkerKind.ROLLOUT
        )

    async def maintain(self) -> None:
        """Until cancelled: roll out changed templates, tell what pods meet with."""
        while True:
            try:
                await self.maintain_once()
            except PacelineError as error:
                log.warning("cannot tend", error=error)
            await asyncio.sleep(MAINTAIN_INTERVAL_S)

    async def maintain_once(self) -> None:
        """One round; a refusal of the cluster for one workload is logged, and the others go on.

        Raises:
            UnavailableError: the cluster has not reported its objects for too long.
        """
        self._tell_of_pods()
        await self._quarantine.look()
        for pool in self._inventory.pools().values():
            await _attempt(name_of(pool), self._release(pool))
        for body in self._inventory.rollouts():
            if not deleting(body):
                await _attempt(name_of(body), self._renew(body))

    def _refusal(self, newest: Object, pods: list[Object]) -> str:
        """Why the newest incarnation of a trainer lacks pods, where the cluster says so."""
        if states.ended(newest) or deleting(newest):
            return ""
        own = [pod for pod in pods if states.same_incarnation(pod, newest)]
        return "" if len(own) >= states.pods_wanted(newest) else self._inventory.refusal_of(newest)

    async def _apply(self, wanted: Wanted, incarnation: int) -> None:
        template = load_template(self._options.templates, wanted)
        await self._apply_credential(wanted, incarnation)
        context = self._manifest_context()
        for body in build(wanted, template, incarnation=incarnation, context=context):
            self._learn(await self._connection.apply(body))

    async def _apply_credential(self, wanted: Wanted, incarnation: int) -> None:
        """Apply a credential before the pods, which do not start without it."""
        credential = await self._credentials.credential(
            wanted, worker=names.object_name(wanted.name), incarnation=incarnation
        )
        context = self._manifest_context()
        await self._connection.apply(credential_of(wanted, credential, context=context))

    async def _release(self, pool: Object) -> None:
        """Give up the number of replicas of a Deployment of the chart, once it is written.

        Owned by nobody, helm may set it when the release no longer leaves it to us; with an owner
        that would be a conflict.
        """
        if (managers := released(pool)) is None:
            return
        version = pool["metadata"]["resourceVersion"]
        changes = {"metadata": {"managedFields": managers, "resourceVersion": version}}
        try:
            self._learn(await self._connection.patch(DEPLOYMENTS, name_of(pool), changes))
        except ConflictError:  # somebody has changed it since: in the next round
            return

    async def _renew(self, body: Object) -> None:
        wanted = names.wanted_of(body)
        template = load_template(self._options.templates, wanted)
        if annotations_of(body).get(names.TEMPLATE) != digest(template):
            await self._roll_out(body, wanted, template)

    async def _roll_out(self, body: Object, wanted: Wanted, template: Object) -> None:
        # The annotation is missing on objects of earlier releases.
        await self._apply_credential(wanted, 0)
        (changed,) = build(wanted, template, incarnation=0, context=self._manifest_context())
        # Never makes it anew, should it have gone meanwhile.
        changed["metadata"]["uid"] = uid_of(body)
        try:
            self._learn(await self._connection.apply(changed))
        except ConflictError:
            return
        self._events.record(wanted.job_id, "TemplateChanged", f"{wanted.name}: pods are replaced")

    def _tell_of_pods(self) -> None:
        pods = [pod for group in self._inventory.pods_by_workload().values() for pod in group]
        for pod in pods:
            why = states.preempted(pod)
            if why and uid_of(pod) not in self._reported:
                self._reported.add(uid_of(pod))
                job_id = pod["metadata"]["labels"].get(names.JOB, "")
                self._events.record(job_id, "Preempted", f"{name_of(pod)}: {why}", warning=True)
        self._reported &= {uid_of(pod) for pod in pods}

    def _judge(
        self, seen: Observed, pods: list[Object], refused: str, queued: str = ""
    ) -> Observed:
        """With the end of patience for what does not get ready, except in a queue for quota."""
        if queued:
            self._waiting.setdefault(seen.job_id, f"{seen.name}: {queued}")
            self._readiness.forget(seen.name)
            if not seen.alive:
                self._words.setdefault(seen.name, f"preempted: {queued}")
            return seen
        refused = f"{seen.name}: {refused}" if refused else ""
        reason = refused or states.waits_for(pods)
        # A job has to know of a shared pool only if nothing of it runs.
        if reason and (seen.job_id or not seen.ready):
            self._waiting.setdefault(seen.job_id, reason)
        if seen.ready or not seen.replicas:
            self._readiness.forget(seen.name)
            return seen
        if seen.alive and not reason:
            live = any(states.live(pod) for pod in pods)
            reason = NOT_READY if live else "no pods are made"
        self._readiness.waits(seen.name, reason)
        news = self._readiness.news(seen.name)
        if news and news != NOT_READY:
            self._events.record(seen.job_id, "Waiting", f"{seen.name}: {news}", warning=True)
        if not self._readiness.over(seen.name):
            return seen
        self._words.setdefault(seen.name, reason)
        return Observed(
            seen.name, seen.job_id, alive=False, replicas=seen.replicas, ready=seen.ready
        )

    async def _delete_beside(self, name: str, kind: WorkerKind) -> None:
        """Delete what lies beside the Deployment or the Jobs of a workload."""
        await self._connection.delete(SECRETS, credential_name(name))
        if kind is not WorkerKind.TRAINER:
            return
        if not self._options.jobset:
            await self._connection.delete(SERVICES, names.object_name(name))
        if self._options.network_policies:
            await self._connection.delete(NETWORK_POLICIES, names.object_name(name))

    async def _clear_trainer(self, name: str) -> None:
        """Delete the Jobs of all incarnations; returns when their pods are gone too."""
        kind = self._inventory.trainer_kind
        chosen = names.selector(release=self._options.release, workload=name)
        # Asked, not remembered: two trainers of one job must never live at a time.
        bodies, _ = await self._connection.list(kind, selector=chosen)
        if bodies and (words := await self._words_now(name)):
            self._words[name] = words
        for body in bodies:
            await self._connection.delete(kind, name_of(body), uid=uid_of(body))
        await self._wait_until_gone(kind, name, *bodies)

    async def _wait_until_gone(self, kind: Kind, name: str, *bodies: Object) -> None:
        """Wait until neither objects nor living pods of a workload are there."""
        chosen = names.selector(release=self._options.release, workload=name)
        deadline, attempt = time.monotonic() + self._gone_s, 0
        while True:
            left, _ = await self._connection.list(kind, selector=chosen)
            pods, _ = await self._connection.list(PODS, selector=chosen)
            if not left and not any(states.live(pod) for pod in pods):
                break
            if time.monotonic() > deadline:
                held = [name_of(remaining) for remaining in [*left, *pods]]
                raise DeadlineError(f"kubernetes: {name}: does not end: {', '.join(held)}")
            await asyncio.sleep(backoff_s(attempt))
            attempt += 1
        cache = self._inventory.deployments if kind is DEPLOYMENTS else self._inventory.trainers
        for body in bodies:
            cache.forget(body)

    async def _words_now(self, name: str) -> str:
        """The rank that ended first says why; the others ended because of it."""
        pods = sorted(self._inventory.pods_by_workload()[name], key=states.ended_at)
        waiting = states.waits_for(pods)
        parts = [waiting] if waiting else []
        for pod in pods:
            if words := states.last_words(pod):
                parts += [marked(f"{name_of(pod)}: {words}"), await self._log_of(pod)]
                break
        return "\n".join(part for part in parts if part)

    async def _log_of(self, pod: Object) -> str:
        try:
            async with asyncio.timeout(self._log_s):
                return await self._connection.log(
                    PODS, name_of(pod), container=CONTAINER, lines=LOG_LINES
                )
        except TimeoutError:
            return f"(no log within {self._log_s:g} s)"
        except PacelineError as error:
            return f"(no log: {error})"

    def _manifest_context(self) -> ManifestContext:
        # Once it is deleted, what is still applied must be garbage-collected with it.
        if owner := self._inventory.deployments.find(self._options.owner):
            self._owner = owner_reference(owner, DEPLOYMENTS)
        return ManifestContext(
            release=self._options.release,
            owner=self._owner,
            ranks_per_pod=self._options.ranks_per_pod,
            accelerators=self._options.accelerators,
            jobset=self._options.jobset,
            network_policies=self._options.network_policies,
        )

    def _learn(self, body: Object) -> None:
        if body["kind"] == DEPLOYMENTS.kind:
            self._inventory.deployments.learn(body)
        elif body["kind"] == self._inventory.trainer_kind.kind:
            self._inventory.trainers.learn(body)


async def _attempt(name: str, work: Awaitable[None]) -> None:
    try:
        await work
    except PacelineError as error:
        log.warning("cannot tend", object=name, error=error)
