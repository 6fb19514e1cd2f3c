"""Inputs of scaling. Counts are those since the last collection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.config.job import JobSpec


@dataclass(frozen=True, slots=True)
class PoolSignals:
    """A job's rollout workers in one pool; activity is that of warm ones only."""

    ready: int = 0  # healthy, with weights
    open_requests: float = 0.0  # running or waiting in ready workers
    warm: int = 0
    requests: float = 0.0  # concurrent, per warm worker while busy
    tokens: float = 0.0
    busy_s: float = 0.0
    idle_s: float = 0.0


@dataclass(frozen=True, slots=True)
class JobSignals:
    """One live job."""

    job_id: str
    spec: JobSpec
    step: int = 0  # the ledger's
    steps: float = 0.0  # trained
    step_s: float = 0.0  # trainer time, working
    wait_s: float = 0.0  # trainer time, waiting for batches
    groups: float = 0.0  # accepted for training
    tokens: float = 0.0  # sampled, also for dropped groups and evaluations
    open_episodes: int = 0  # queued or leased
    headroom_groups: int = 0  # that admission would admit at this moment
    mean_group: int = 0  # episodes of the last groups, on average; 0: unknown
    published: float = 0.0  # versions
    spreading_s: float = 0.0  # time that most rollout workers lacked the newest version
    measuring: bool = False  # an evaluation is open
    pools: Mapping[str, PoolSignals] = field(default_factory=dict[str, PoolSignals])

    @property
    def group_size(self) -> int:
        """Episodes of a group, on average."""
        return self.mean_group or self.spec.experience.group_size

    @property
    def wanted_episodes(self) -> int:
        """Open episodes, and those that would be admitted on request."""
        return self.open_episodes + self.headroom_groups * self.group_size


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
    pending: float = 0.0  # answers queued in workers, or in callers that wait for one
    busy_s: float = 0.0
    scored: float = 0.0


@dataclass(frozen=True, slots=True)
class Signals:
    """All signals of one collection; `jobs` are those that have or want processes."""

    seconds: float  # since the last collection; 0: the first
    jobs: tuple[JobSignals, ...] = ()
    environment: EnvironmentSignals = EnvironmentSignals()
    reward: RewardSignals = RewardSignals()
