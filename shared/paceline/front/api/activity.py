"""Activity of an installation: its jobs and processes, and the seconds that they waited.

Seconds are cumulative, so the difference of two snapshots is a rate (`paceline.front.api.blame`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.enums import WorkerKind
from paceline.types import JobStatus


@dataclass(frozen=True, slots=True)
class JobActivity:
    """An unfinished job."""

    status: JobStatus
    target_steps: int = 0
    waits_s: dict[str, float] = field(default_factory=dict[str, float])
    """By the service that the job waits for."""
    reward: float | None = None
    """Mean of the newest batch."""
    staleness: float = 0.0
    """Mean of the trained episodes, in steps."""
    tokens: int = 0
    """Sampled, for training and evals."""
    trained_tokens: int = 0
    leased: int = 0
    """Episodes that environments hold."""
    open_groups: int = 0
    ready_groups: int = 0
    headroom_groups: int = 0
    """Groups that would be admitted now; 0: it is at the bound of staleness."""
    waiting: bool = False
    """Whether the trainer waits for a batch."""
    held: bool = False
    """Whether the controller does not start it yet."""


@dataclass(frozen=True, slots=True)
class ProcessActivity:
    """A process of the installation, as of its last heartbeat."""

    worker_id: str
    kind: WorkerKind
    job_id: str = ""
    """Empty: it is shared by all jobs."""
    active_version: int = -1
    capacity: float = 1.0
    """Slots of an environment worker, else 1."""
    busy_s: float = 0.0
    """In use; of a worker with slots, summed over these."""
    stalled_s: float = 0.0
    handling_s: float = 0.0
    """With a call of a client in progress."""
    waits_s: dict[str, float] = field(default_factory=dict[str, float])
    """By the service that it waits for."""
    load: dict[str, float] = field(default_factory=dict[str, float])
    """Load as it reports it; empty for shared processes, unless the caller sees all tenants."""


@dataclass(frozen=True, slots=True)
class Activity:
    """A snapshot; `clock_s` is monotonic until the experience service restarts."""

    clock_s: float
    jobs: tuple[JobActivity, ...] = ()
    processes: tuple[ProcessActivity, ...] = ()
    more_jobs: bool = False
    processes_left_out: int = 0
