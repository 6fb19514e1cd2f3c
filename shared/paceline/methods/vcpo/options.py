"""Options of `vcpo_step`; no torch here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.plugins import StrictModel


class VcpoStepOptions(StrictModel):
    """Options of `vcpo_step`."""

    base: float = Field(default=1.0, gt=0.0, le=1.0)
    """Effective share of the sequences at and above which the learning rate is not lowered; 0.55
    in the paper's runs with several turns."""
    rule: Literal["sqrt", "linear"] = "sqrt"
