"""In-memory dependencies of a controller: a manual clock, a runtime, a ledger of jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from paceline.enums import EXPLAINED, JobState, check_job_transition
from paceline.errors import StateError, UnavailableError
from paceline.front.api.tenants import Tenant
from paceline.platform.text import clipped


@dataclass(slots=True)
class FakeClock:
    """A clock that only advances through `pass_s`."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        """The current time."""
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        """Advance the clock."""
        self.now_s += seconds


class _Wanted(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def job_id(self) -> str: ...
    @property
    def replicas(self) -> int: ...


@dataclass(slots=True)
class FakeObserved:
    """The runtime's view of a process."""

    name: str
    job_id: str = ""
    alive: bool = True
    outdated: bool = False
    replicas: int = 1
    ready: int = 0
    pending: bool = False
    devices: tuple[int, ...] = ()


@dataclass(slots=True)
class MemoryRuntime:
    """Workloads whose fate a test controls; `expand` lists the named units of a workload."""

    expand: Callable[[Iterable[Any]], list[Any]] = list

    running: dict[str, FakeObserved] = field(default_factory=dict[str, FakeObserved])
    starts: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    stops: list[str] = field(default_factory=list[str])
    scales: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    silent: set[str] = field(default_factory=set[str])
    broken: set[str] = field(default_factory=set[str])
    waits: dict[str, str] = field(default_factory=dict[str, str])
    words: str = ""

    def units(self, wanted: Iterable[Any]) -> list[Any]:
        """The workloads themselves, or the units from `expand`."""
        return self.expand(wanted)

    async def list(self) -> Any:
        """Everything started and not yet stopped."""
        return [replace(observed) for observed in self.running.values()]

    async def start(self, wanted: _Wanted, *, incarnation: int) -> None:
        """Start a unit, unless a test marked it as broken."""
        self.starts.append((wanted.name, incarnation))
        if wanted.name in self.broken:
            raise OSError("no such file")
        self.running[wanted.name] = FakeObserved(
            wanted.name, wanted.job_id, replicas=wanted.replicas
        )

    async def scale(self, name: str, replicas: int) -> None:
        """Change the number of replicas immediately."""
        self.scales.append((name, replicas))
        self.running[name].replicas = replicas

    async def stop(self, name: str, *, grace_s: float) -> None:
        """Stop a unit immediately."""
        self.stops.append(name)
        self.running.pop(name, None)

    async def ready(self, name: str) -> bool:
        """Whether it is alive and a test did not mark it as silent."""
        return name in self.running and self.running[name].alive and name not in self.silent

    async def last_words(self, name: str) -> str:
        """A fixed text, or the one set by the test."""
        return self.words or f"ValueError: the end of {name}"

    def waits_for(self, job_id: str) -> str:
        """The reason set by the test."""
        return self.waits.get(job_id, "")

    async def close(self) -> None:
        """Release nothing."""

    def die(self, name: str) -> None:
        """Let a process die."""
        self.running[name].alive = False


@dataclass(slots=True)
class MemoryLedger:
    """Jobs by id, any objects with `job_id`, `state` and `step`, with checked transitions."""

    jobs: dict[str, Any] = field(default_factory=dict[str, Any])
    incarnations: dict[str, int] = field(default_factory=dict[str, int])
    reasons: dict[str, str] = field(default_factory=dict[str, str])
    quotas: dict[str, Tenant] = field(default_factory=dict[str, Tenant])
    failures: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    causes: dict[str, str] = field(default_factory=dict[str, str])
    reason_bytes: int = 4096
    told: int = 0  # states, or reasons of them
    away: bool = False

    async def live_jobs(self) -> list[Any]:
        """All unfinished jobs."""
        self._answer()
        return [job for job in self.jobs.values() if not job.state.terminal]

    async def tenants(self) -> dict[str, Tenant]:
        """Quotas and usage, set by the test."""
        self._answer()
        return self.quotas

    async def grant_incarnation(self, job_id: str) -> int:
        """Grant the next incarnation."""
        self._answer()
        if self.jobs[job_id].state.terminal:
            raise StateError(f"job {job_id} is over")
        self.incarnations[job_id] = self.incarnations.get(job_id, 0) + 1
        return self.incarnations[job_id]

    async def report_failure(self, job_id: str, reason: str) -> tuple[int, str]:
        """Count a failure since the job's last step; `causes` has the reasons from trainers."""
        self._answer()
        step, count = self.failures.get(job_id, (-1, 0))
        now = self.jobs[job_id].step
        count = 1 if now > step else count + 1
        self.failures[job_id] = max(now, step), count
        return count, self.causes.get(job_id, reason)

    async def set_state(self, job_id: str, state: JobState, *, reason: str = "") -> None:
        """Move a job to a state; a waiting one may only get a new reason."""
        self._answer()
        if not (self.jobs[job_id].state is state and state in EXPLAINED):
            check_job_transition(self.jobs[job_id].state, state)
        self.told += 1
        self.reasons[job_id] = clipped(reason, self.reason_bytes)
        self.put(job_id, state=state, reason=self.reasons[job_id])

    def put(self, job_id: str, **changes: Any) -> None:
        """Change fields of a job."""
        self.jobs[job_id] = replace(self.jobs[job_id], **changes)

    def _answer(self) -> None:
        if self.away:
            raise UnavailableError("experience cannot be reached")


class MadeUpCredentials:
    """Credentials that no service would accept, each another one."""

    async def credential(self, wanted: _Wanted, *, worker: str, incarnation: int) -> str:
        """A text with the claims in it."""
        return f"plj_{wanted.job_id}/{worker}/{incarnation}/made-up"
