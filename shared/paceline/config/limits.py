"""How much an installation takes in: the section `limits` of all its processes."""

from __future__ import annotations

from pydantic import Field

from paceline.config.base import Closed
from paceline.config.quota import KIB, MIB, Quota


class LimitSettings(Closed):
    """The same in all processes of an installation. See docs/limits.md."""

    tenant: Quota = Quota()
    """Of every tenant that an admin has given none of its own."""
    prompt_bytes: int = Field(default=MIB, ge=1, le=64 * MIB)
    """Text of one observation of an environment, before it is rendered."""
    reason_bytes: int = Field(default=4 * KIB, ge=64, le=64 * KIB)
    """Why a job is in its state, or an episode was given back; more is cut off."""
    page_bytes: int = Field(default=4 * MIB, ge=64 * KIB, le=8 * MIB)
    """Of a list or an event, about: a page ends with the item that reaches it.

    With that item, of 32 MiB at most, it still fits into a message.
    """
    eval_window: int = Field(default=2048, ge=1, le=65536)
    """Episodes of an evaluation that the store holds at once."""
