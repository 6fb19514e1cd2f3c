"""Beyond the 80/20 rule (arXiv 2506.01939): only tokens of high entropy train.

A minority of "forking" tokens steers the reasoning; the rest dilutes the gradient. The release
selects within a micro-batch and averages over selected tokens only (`denominator: after_masks`);
here exactly the share is selected over the whole update.
"""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import Method, Plugin, StrictModel, declares


@declares(needs=("entropy", "whole_batch"))
class HighEntropyOptions(StrictModel):
    """Options of `high_entropy`."""

    share: float = Field(default=0.2, gt=0.0, le=1.0)
    """Share of the update's tokens that train: those of highest entropy; at least one."""


METHOD = Method(
    stage="control",
    evidence="code",
    claim="+11.0 on AIME 2025 and +7.7 on AIME 2024 with 32B",
    parts={"corrections": {"high_entropy": Plugin(".correction:high_entropy", HighEntropyOptions)}},
)
