"""Input limits of an installation: the section `limits` of all its processes."""

from __future__ import annotations

from pydantic import Field

from paceline.config.quota import KIB, MIB, Quota
from paceline.plugins import StrictModel


class LimitSettings(StrictModel):
    """Must be the same in all processes of an installation. See docs/limits.md."""

    tenant: Quota = Quota()
    """Quota of every tenant that has no quota of its own."""
    prompt_bytes: int = Field(default=MIB, ge=1, le=64 * MIB)
    """Text of one observation of an environment, before rendering."""
    reason_bytes: int = Field(default=4 * KIB, ge=64, le=64 * KIB)
    """Reason of a job's state or of a returned episode; longer texts are truncated."""
    page_bytes: int = Field(default=4 * MIB, ge=64 * KIB, le=8 * MIB)
    """Approximate size of a list page or an event: a page ends with the item that exceeds it.

    Including that item, of 32 MiB at most, it still fits into a message.
    """
    eval_window: int = Field(default=2048, ge=1, le=65536)
    """Episodes of an evaluation in the store at once."""
