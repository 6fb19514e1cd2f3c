"""What scaling looks at. Counts are those since the last look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.config.job import JobSpec


@dataclass(frozen=True, slots=True)
class PoolSignals:
    """A job's rollout workers in one pool; what they did is of warm ones only."""

    ready: int = 0  # answer, with weights
    open_requests: float = 0.0  # running or waiting in all of them
    warm: int = 0
    requests: float = 0.0  # at once in a warm one while it works
    tokens: float = 0.0
    busy_s: float = 0.0
    idle_s: float = 0.0


@dataclass(frozen=True, slots=True)
class JobSignals:
    """One live job."""

    job_id: str
    spec: JobSpec
    step: int = 0  # that it has come to
    steps: float = 0.0  # trained
    step_s: float = 0.0  # that the trainer worked
    wait_s: float = 0.0  # that it waited for batches
    groups: float = 0.0  # made that can be trained
    tokens: float = 0.0  # sampled for them, for dropped ones and for evaluations
    open_episodes: int = 0  # queued or leased
    headroom_groups: int = 0  # that admission would let in at this moment
    published: float = 0.0  # versions
    spreading_s: float = 0.0  # that most rollout workers were without the newest one
    measuring: bool = False  # an evaluation is open
    pools: Mapping[str, PoolSignals] = field(default_factory=dict[str, PoolSignals])

    @property
    def wanted_episodes(self) -> int:
        """Open, and those that would be if somebody asked for them."""
        return self.open_episodes + self.headroom_groups * self.spec.experience.group_size


@dataclass(frozen=True, slots=True)
class EnvironmentSignals:
    """All environment workers."""

    ready: int = 0
    slots: float = 0.0  # of one worker; 0: unknown
    cpu_share: float = 0.0  # cores used by all


@dataclass(frozen=True, slots=True)
class RewardSignals:
    """All reward workers."""

    ready: int = 0
    pending: float = 0.0  # answers in them, or that wait for one of them to appear
    busy_s: float = 0.0
    scored: float = 0.0


@dataclass(frozen=True, slots=True)
class Signals:
    """Everything, at one look; `jobs` are those that have or want processes."""

    seconds: float  # since the last look; 0: the first
    jobs: tuple[JobSignals, ...] = ()
    environment: EnvironmentSignals = EnvironmentSignals()
    reward: RewardSignals = RewardSignals()
