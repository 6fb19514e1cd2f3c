"""Masked importance sampling: rejects tokens or sequences by how far engine and trainer disagree.

verl's rejection sampling (`rollout_corr_helper.py`) and slime's examples of train/inference
mismatch. The answer is a mask; together with `tis` the tokens that are kept are weighted as well.
Bounds as narrow as those of the geometric mean in the sources are for engine mismatch at equal
weights; stale samples are nearly all rejected by them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.plugins import Method, Plugin, StrictModel


class MisOptions(StrictModel):
    """Options of `mis`."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """Whose ratio has to be within bounds: the token's, the sequence's product, or the geometric
    mean of the sequence."""
    lower: float | None = Field(default=None, ge=0.0)
    """1 / upper if null."""
    upper: float = Field(default=2.0, gt=0.0)
    veto: float | None = Field(default=None, gt=0.0, lt=1.0)
    """A sequence is rejected if the ratio of any of its tokens is below this; null: no veto."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bound."""
        return (1.0 / self.upper if self.lower is None else self.lower), self.upper

    @model_validator(mode="after")
    def _bounds_in_order(self) -> MisOptions:
        lower, upper = self.bounds
        if lower > upper:
            raise ValueError(f"lower: {lower} is above upper {upper}")
        return self


METHOD = Method(
    stage="control",
    evidence="code",
    claim="training with the log-probs of another engine stays stable",
    parts={"corrections": {"mis": Plugin(".correction:mis", MisOptions)}},
)
