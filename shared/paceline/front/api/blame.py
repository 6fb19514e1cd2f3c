"""Which service keeps jobs from being faster: waits between two snapshots, followed to their roots.

The same attribution as the recording rules of Prometheus (`docs/metrics.md`), for installations
that nobody scrapes, and for users who reach only the gateway.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paceline.enums import JobState, WorkerKind
from paceline.front.api.activity import Activity, ProcessActivity

LEAST_SCORE = 0.05  # below which nothing is a bottleneck
_LIVE = frozenset({JobState.QUEUED, JobState.STARTING, JobState.RUNNING})
_EPISODES_WAIT_FOR = ("controller", "weights", "environment", "rollout", "reward")


@dataclass(frozen=True, slots=True)
class ServiceUse:
    """Processes of one kind between two snapshots."""

    kind: str
    processes: int = 0
    capacity: float = 0.0
    in_use: float = 0.0
    """Capacity in use, on average."""
    handling: float = 0.0
    """Processes with a call of a client in progress, on average."""
    stalled: float = 0.0
    """Share of the time in which they did not run, although they should have."""
    waits: dict[str, float] = field(default_factory=dict[str, float])
    """Episodes, trainers or calls that waited on average, by the service that they waited for."""

    @property
    def busy(self) -> float:
        """Share of the capacity in use."""
        return self.in_use / self.capacity if self.capacity else 0.0


@dataclass(frozen=True, slots=True)
class Attribution:
    """Who waited for whom."""

    services: tuple[ServiceUse, ...]
    scores: dict[str, float]
    """Share of the time of live jobs that each service cost, and in which it was stalled."""
    tokens_per_s: dict[str, float]
    """Sampled, by job."""
    waits: dict[str, dict[str, float]]
    """Share of the time that each job waited for each service."""

    @property
    def bottleneck(self) -> str:
        """The service with the highest score; empty: none is above 0.05."""
        name = max(self.scores, key=lambda service: self.scores[service], default="")
        return name if self.scores.get(name, 0.0) > LEAST_SCORE else ""


def attribute(before: Activity, now: Activity) -> Attribution | None:
    """Blame between two snapshots; None: no time has passed, or experience was restarted.

    A process or job that is in one of them only does not count.
    """
    seconds = now.clock_s - before.clock_s
    if seconds <= 0:
        return None
    services = {service.kind: service for service in _services(before, now, seconds)}
    known = {job.status.job_id: job for job in before.jobs}
    waits: dict[str, dict[str, float]] = {}
    tokens: dict[str, float] = {}
    for job in now.jobs:
        first = known.get(job.status.job_id)
        if first is not None:
            waits[job.status.job_id] = _rates(first.waits_s, job.waits_s, seconds)
            tokens[job.status.job_id] = max(0, job.tokens - first.tokens) / seconds
    units = Counter[str]()
    for job_waits in waits.values():
        units.update(job_waits)
    live = sum(job.status.state in _LIVE and not job.held for job in now.jobs)
    blamed = _blamed(services, units, live)
    scores = {name: share / max(live, 1) for name, share in blamed.items()}
    if (gateway := services.get("gateway")) is not None:
        scores["gateway"] = max(0.0, gateway.handling - gateway.waits.get("experience", 0.0))
    for name, service in services.items():
        scores[name] = scores.get(name, 0.0) + service.stalled
    return Attribution(tuple(services.values()), scores, tokens, waits)


def _services(before: Activity, now: Activity, seconds: float) -> Iterable[ServiceUse]:
    """One of each kind that is there, in the order of `WorkerKind`."""
    pairs: defaultdict[WorkerKind, list[tuple[ProcessActivity, ProcessActivity]]]
    pairs = defaultdict(list)
    known = {process.worker_id: process for process in before.processes}
    for process in now.processes:
        # A process that was restarted under its name begins at zero.
        first = known.get(process.worker_id)
        if first is None or first.busy_s > process.busy_s:
            first = process
        pairs[process.kind].append((first, process))
    for kind in WorkerKind:
        if changes := pairs.get(kind):
            yield _use(kind, changes, seconds)


def _use(
    kind: WorkerKind, pairs: list[tuple[ProcessActivity, ProcessActivity]], seconds: float
) -> ServiceUse:
    waits = Counter[str]()
    for first, last in pairs:
        waits.update(_rates(first.waits_s, last.waits_s, seconds))
    grown = [
        (
            last.busy_s - first.busy_s,
            last.stalled_s - first.stalled_s,
            last.handling_s - first.handling_s,
        )
        for first, last in pairs
    ]
    in_use, stalled, handling = (sum(column) / seconds for column in zip(*grown, strict=True))
    return ServiceUse(
        kind=kind.value,
        processes=len(pairs),
        capacity=sum(last.capacity for _, last in pairs),
        in_use=in_use,
        handling=handling,
        stalled=stalled / len(pairs),
        waits=dict(waits),
    )


def _rates(
    before: Mapping[str, float], now: Mapping[str, float], seconds: float
) -> dict[str, float]:
    grown = {name: total - before.get(name, 0.0) for name, total in now.items()}
    return {name: amount / seconds for name, amount in grown.items() if amount > 0}


def _blamed(
    services: Mapping[str, ServiceUse], jobs: Mapping[str, float], live: int
) -> dict[str, float]:
    """Jobs that each service kept waiting, as `paceline:blame:units`."""
    trainer = _waits_of(services, "trainer")
    shares = _episode_shares(services)
    without_batch = jobs.get("environment", 0.0)
    blamed = {name: without_batch * shares.get(name, 0.0) for name in _EPISODES_WAIT_FOR}
    blamed["controller"] += jobs.get("controller", 0.0)
    blamed["weights"] += trainer.get("weights", 0.0) + jobs.get("weights", 0.0)
    asks, elsewhere = trainer.get("experience", 0.0), trainer.get("weights", 0.0)
    blamed["trainer"] = max(0.0, live - asks - elsewhere - jobs.get("controller", 0.0))
    waits_known = sum(jobs.get(name, 0.0) for name in ("environment", "store", "weights"))
    asking = max(0.0, asks - waits_known) + without_batch * shares.get("experience", 0.0)
    of_store = _store_share(services)
    blamed["experience"] = asking * (1 - of_store)
    blamed["store"] = asking * of_store + jobs.get("store", 0.0)
    return blamed


def _waits_of(services: Mapping[str, ServiceUse], kind: str) -> Mapping[str, float]:
    return services[kind].waits if kind in services else {}


def _episode_shares(services: Mapping[str, ServiceUse]) -> dict[str, float]:
    """Where open episodes are, in shares; what waits for nobody is with the environment."""
    waits = _waits_of(services, "environment")
    in_use = services["environment"].in_use if "environment" in services else 0.0
    shares = {name: min(1.0, count / in_use) for name, count in waits.items()} if in_use else {}
    shares.pop("environment", None)
    return shares | {"environment": max(0.0, 1.0 - sum(shares.values()))}


def _store_share(services: Mapping[str, ServiceUse]) -> float:
    """The store's share of the time that calls spend in experience."""
    experience = services.get("experience")
    if experience is None or not experience.handling:
        return 0.0
    return min(1.0, experience.waits.get("store", 0.0) / experience.handling)
