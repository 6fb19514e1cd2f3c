"""D3S: dynamic dual-level down-sampling (arXiv 2509.22115).

Most samples and tokens carry little signal. Level 1 trains the episodes whose advantages have the
largest variance, level 2 the tokens with the largest product of advantage and entropy. Shares grow
over training; their start and end are not stated in the paper.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.plugins import Method, Plugin, StrictModel, declares


class D3sEpisodesOptions(StrictModel):
    """Options of `d3s_episodes`."""

    start: float = Field(gt=0.0, le=1.0)
    """Share of the episodes that train at the first step; 0.25 is a reasonable start."""
    end: float = Field(gt=0.0, le=1.0)
    """At the last step; in between it changes linearly."""
    scope: Literal["batch", "group"] = "batch"
    """Where episodes are chosen; `group` is reported as more stable for weak models."""


@declares(needs=("entropy", "whole_batch"))
class D3sTokensOptions(StrictModel):
    """Options of `d3s_tokens`."""

    start: float = Field(gt=0.0, le=1.0)
    """Share of the tokens of an update that train at the first step; 0.1 is a reasonable start."""
    end: float = Field(gt=0.0, le=1.0)
    """At the last step; in between it changes linearly. The paper uses fewer than 20 %."""


METHOD = Method(
    stage="control",
    evidence="notes",
    claim="34.3 and 56.8 against 29.8 and 53.1 of GRPO (7B), 2.0 times faster",
    parts={
        "advantages": {"d3s_episodes": Plugin(".advantage:d3s_episodes", D3sEpisodesOptions)},
        "corrections": {"d3s_tokens": Plugin(".correction:d3s_tokens", D3sTokensOptions)},
    },
)
