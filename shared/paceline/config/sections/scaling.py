"""Settings of autoscaling."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.plugins import StrictModel


class EnvironmentScaling(StrictModel):
    """Scaling of environment workers by runnable episodes."""

    max_replicas: int = Field(default=16, ge=1)
    occupancy: float = Field(default=0.8, gt=0, le=1)
    """Target utilisation of a worker's slots, and of its one core."""


class RewardScaling(StrictModel):
    """Scaling of reward workers by answers waiting for a score."""

    max_replicas: int = Field(default=16, ge=1)
    queue_s: float = Field(default=5.0, gt=0)
    """Time in which the queue should be cleared."""
    occupancy: float = Field(default=0.8, gt=0, le=1)
    """Target utilisation of a worker's time."""


class ScalingOptions(StrictModel):
    """Autoscaling; see docs/scaling.md."""

    executor: Literal["controller", "external"] = "controller"
    """`external`: another autoscaler sets replicas from the metrics; the controller does not."""
    period_s: float = Field(default=5.0, gt=0)
    """Interval between decisions."""
    warmup_s: float = Field(default=20.0, ge=0)
    """Time after becoming ready during which a worker's speed is not measured."""
    smooth_s: float = Field(default=60.0, gt=0)
    """Time constant of moving averages; `smooth_steps` trainer steps if those take longer."""
    smooth_steps: int = Field(default=32, ge=1)
    margin: float = Field(default=0.1, ge=0)
    """Extra share of rollout workers, for dropped episodes and noise."""
    scale_up_tolerance: float = Field(default=0.1, ge=0, lt=1)
    """Relative shortage of workers that is tolerated before scaling up; larger while the
    measurements are uncertain."""
    scale_down_tolerance: float = Field(default=0.1, ge=0, lt=1)
    """Relative surplus of workers that is tolerated before scaling down; likewise."""
    starved: float = Field(default=0.05, gt=0, lt=1)
    """Share of its time that a trainer may wait before rollout workers are added."""
    sync_wait: float = Field(default=0.5, gt=0, lt=1)
    """The same where sampling and training cannot overlap (`max_staleness: 0`)."""
    first_step_s: float = Field(default=60.0, gt=0)
    """Assumed duration of a trainer step until the first one is measured."""
    requests_each: float = Field(default=4.0, gt=0)
    """Concurrent requests per rollout worker below which there are too many workers."""
    scale_up_cooldown_s: float = Field(default=15.0, ge=0)
    """Minimum time between increases."""
    scale_down_stabilization_s: float = Field(default=300.0, ge=0)
    """How long fewer workers must have been enough before scaling down."""
    max_scale_up: float = Field(default=3.0, gt=1)
    """Largest factor of one increase."""
    max_scale_down: float = Field(default=0.5, gt=0, lt=1)
    """Smallest factor of one decrease."""
    pool_timeout_s: float = Field(default=180.0, gt=0)
    """How long a pool may fail to deliver a requested worker before another pool is tried."""
    retry_s: float = Field(default=900.0, gt=0)
    """Time after which it is tried again."""
    idle_s: float = Field(default=600.0, ge=0)
    """Time without a job until scaled shared pools go to zero."""
    environment: EnvironmentScaling | None = None
    """If null, `environment_replicas` is constant, otherwise the minimum while a job is live."""
    reward: RewardScaling | None = None
    """Likewise with `reward_replicas`."""
