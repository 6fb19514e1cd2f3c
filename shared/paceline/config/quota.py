"""What a tenant may use of an installation."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from paceline.config.base import Closed

Limit = Annotated[int | None, Field(ge=0)]


class Quota(Closed):
    """Limits over all jobs of a tenant; null: none. See docs/tenants.md."""

    submitted: Limit = None
    """Jobs that are not over; another one is refused."""
    jobs: Limit = None
    """Jobs that run at once; others stay queued."""
    rollout_workers: Limit = None
    episodes: Limit = None
    """Episodes that run at once in environment workers, evaluations too."""
    weight: float = Field(default=1.0, gt=0, le=1e6)
    """Share of what several tenants want, relative to theirs."""
