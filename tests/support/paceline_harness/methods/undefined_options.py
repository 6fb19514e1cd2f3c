"""Options of `undefined`; no torch here."""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import StrictModel


class UndefinedOptions(StrictModel):
    """Options of `undefined`: the updates of a trainer whose loss is NaN, counted from 0."""

    first: int = Field(ge=0)
    last: int = Field(default=1_000_000, ge=0)
