"""Options of `d3s_episodes` and `d3s_tokens`; neither torch nor numpy here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.plugins import StrictModel, declares


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
