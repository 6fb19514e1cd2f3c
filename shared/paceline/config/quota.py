"""What a tenant may use of an installation."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from paceline.config.base import Closed

MAX_COUNT = 10**9
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
# No quota lets in more than that: it has to fit into a message beside others.
MAX_SPEC_BYTES = MIB
MAX_MODEL_FILES_BYTES = 32 * MIB
MAX_TASK_BYTES = 8 * MIB
MAX_TRAJECTORY_BYTES = 32 * MIB
MAX_METRICS_BYTES = MIB

Limit = Annotated[int | None, Field(ge=0, le=MAX_COUNT)]


class Quota(Closed):
    """Limits of a tenant; null: none. See docs/limits.md."""

    submitted: Limit = 100
    """Jobs that are not over; another one is refused."""
    jobs: Limit = None
    """Jobs that run at once; others stay queued."""
    rollout_workers: Limit = None
    episodes: Limit = None
    """Episodes that run at once in environment workers, evaluations too."""
    stored_bytes: Annotated[int | None, Field(ge=0, le=1 << 50)] = 16 * GIB
    """Trajectories of all its live jobs in the store; above it no episode is admitted."""
    spec_bytes: int = Field(default=256 * KIB, ge=1, le=MAX_SPEC_BYTES)
    """A job file, with all defaults, as JSON; a larger one is refused."""
    model_files_bytes: int = Field(default=MAX_MODEL_FILES_BYTES, ge=1, le=MAX_MODEL_FILES_BYTES)
    """The small files of a job's model together; a job with more is refused."""
    task_bytes: int = Field(default=256 * KIB, ge=1, le=MAX_TASK_BYTES)
    """One task as a task source makes it; the group of a larger one is dropped."""
    trajectory_bytes: int = Field(default=16 * MIB, ge=1, le=MAX_TRAJECTORY_BYTES)
    """One episode with all its transcripts; the group of a larger one is dropped."""
    metrics_bytes: int = Field(default=64 * KIB, ge=1, le=MAX_METRICS_BYTES)
    """What a trainer reports of one step; more is left out of the step's row."""
    weight: float = Field(default=1.0, gt=0, le=1e6)
    """Share of what several tenants want, relative to theirs."""
