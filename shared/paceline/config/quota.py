"""Quotas of tenants."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from paceline.plugins import StrictModel

MAX_COUNT = 10**9
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
# Upper bounds for all quotas: each payload has to fit into a message along with others.
MAX_SPEC_BYTES = MIB
MAX_MODEL_FILES_BYTES = 32 * MIB
MAX_CODE_BYTES = GIB  # sent in pieces
MAX_TASK_BYTES = 8 * MIB
MAX_TRAJECTORY_BYTES = 32 * MIB
MAX_METRICS_BYTES = MIB

Limit = Annotated[int | None, Field(ge=0, le=MAX_COUNT)]


class Quota(StrictModel):
    """Limits of a tenant; null: unlimited. See docs/limits.md."""

    submitted: Limit = 100
    """Unfinished jobs; further submissions are refused."""
    jobs: Limit = None
    """Jobs that run at once; further ones stay queued."""
    rollout_workers: Limit = None
    episodes: Limit = None
    """Episodes in flight in environment workers, evaluations included."""
    stored_bytes: Annotated[int | None, Field(ge=0, le=1 << 50)] = 16 * GIB
    """Trajectories of all its live jobs in the store; no episode is admitted above it."""
    spec_bytes: int = Field(default=256 * KIB, ge=1, le=MAX_SPEC_BYTES)
    """Job file as JSON, with all defaults; a larger one is refused."""
    model_files_bytes: int = Field(default=MAX_MODEL_FILES_BYTES, ge=1, le=MAX_MODEL_FILES_BYTES)
    """Total of the small files of a job's model; a job with more is refused."""
    code_bytes: int = Field(default=256 * MIB, ge=1, le=MAX_CODE_BYTES)
    """The packed code of a job; a larger upload is refused. 1: its jobs may bring none."""
    uploaded_bytes: int = Field(default=GIB, ge=1, le=1 << 40)
    """All code that it uploads within a week; more is refused."""
    task_bytes: int = Field(default=256 * KIB, ge=1, le=MAX_TASK_BYTES)
    """One task as produced by its source; the group of a larger one is dropped."""
    trajectory_bytes: int = Field(default=16 * MIB, ge=1, le=MAX_TRAJECTORY_BYTES)
    """One episode with all transcripts; the group of a larger one is dropped."""
    metrics_bytes: int = Field(default=64 * KIB, ge=1, le=MAX_METRICS_BYTES)
    """Metrics that a trainer reports for one step; larger ones are omitted from its row."""
    weight: float = Field(default=1.0, gt=0, le=1e6)
    """Relative share of contended capacity."""
