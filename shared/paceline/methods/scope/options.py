"""Options of `shared_prefix`; no numpy here."""

from __future__ import annotations

from typing import Literal

from paceline.plugins import StrictModel


class SharedPrefixOptions(StrictModel):
    """Options of `shared_prefix`."""

    credit: Literal["best", "mean"] = "best"
    """What a token that several episodes have is given of their advantages."""
