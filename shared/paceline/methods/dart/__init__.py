"""DART: decoupled agentic RL training for GUI agents (arXiv 2509.23866).

Single episodes are scheduled instead of batches of them: tasks that were never tried and then the
weakest come first, and those that mostly succeed get fewer episodes. A group without a success
gets a stored one of its task. Groups are trimmed with both kinds of outcome in them; `dart_trim`
trims by weights, which leaves the baseline to the whole group. What the paper has and the release
has not are options: `slack` of `dart_rollouts`, so that no episode is much longer than a success
before, and the correction `dart_steps`, with which only turns of high entropy train.
"""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import Method, Plugin, StrictModel, declares


@declares(needs=("group>=2",))
class DartTrimOptions(StrictModel):
    """Options of `dart_trim`."""

    keep: int = Field(ge=2, le=4096)
    """Episodes of each group that train."""
    success: float = 0.5
    """Rewards above it are successes."""


@declares(needs=("entropy", "whole_batch"))
class DartStepsOptions(StrictModel):
    """Options of `dart_steps`."""

    share: float = Field(default=0.8, gt=0.0, le=1.0)
    """Share of the update's turns that train: the turns with the highest mean entropy of tokens."""


METHOD = Method(
    stage="generate",
    evidence="code",
    claim="42.1 % on OSWorld-Verified, +14.6 over the base model, with its pool of successes",
    parts={
        "samplers": {"dart_order": Plugin(".sampler:DartOrder")},
        "allocators": {"dart_rollouts": Plugin(".allocator:DartRollouts")},
        "replays": {"dart_pool": Plugin(".replay:DartPool")},
        "advantages": {"dart_trim": Plugin(".advantage:dart_trim", DartTrimOptions)},
        "corrections": {"dart_steps": Plugin(".correction:dart_steps", DartStepsOptions)},
    },
)
