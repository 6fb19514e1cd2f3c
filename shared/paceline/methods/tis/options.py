"""Options of `tis`; no torch here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.methods.parts.options import ClipOptions


class TisOptions(ClipOptions):
    """Options of `tis`."""

    cap: float = Field(default=2.0, gt=0.0)
    level: Literal["token", "sequence"] = "token"
    """`sequence`: the product over a sequence is the weight of all its tokens."""
