"""XRPO: a planner of rollouts, and novelty-aware sharpening of advantages (arXiv 2510.06672).

Equal numbers of rollouts waste them on prompts of which all is known: more go where they narrow the
interval of the mean reward most. Equal credit for all correct answers ignores the novel ones:
correct answers that the policy finds less likely than others of their group get more; this follows
another advantage.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.plugins import Method, Plugin, StrictModel, declares


@declares(needs=("group>=2", "tokens"))
class XrpoNoveltyOptions(StrictModel):
    """Options of `xrpo_novelty`."""

    scale: float = Field(default=2.5, ge=0.0)
    """Factor of the novelty."""
    bound: float = Field(default=0.5, ge=0.0)
    """At most this share of the advantage is added."""


class XrpoSeedsOptions(StrictModel):
    """Options of `xrpo_seeds`."""

    examples: int = Field(default=2, ge=1, le=16)
    """K: solved tasks before the question, at most."""
    question_field: str = Field(default="question", min_length=1, max_length=64)
    """Field of a task's payload with its question."""
    example: str = Field(default="Question: {question}\nAnswer: {answer}\n\n", max_length=1024)
    """How one is shown."""
    max_chars: int = Field(default=512, ge=1, le=65536)
    """Longer questions and answers of examples are cut."""
    train_as: Literal["sampled", "original"] = "sampled"
    """Whether to train under the prompt with examples, as in the paper, or the plain one."""


METHOD = Method(
    stage="generate",
    evidence="notes",
    claim="up to +4 pass@1 and 2.7 times faster convergence, with seeded prompts",
    parts={
        "transforms": {"xrpo_seeds": Plugin(".transform:xrpo_seeds", XrpoSeedsOptions)},
        "allocators": {"xrpo_planner": Plugin(".allocator:XrpoPlanner")},
        "advantages": {"xrpo_novelty": Plugin(".advantage:xrpo_novelty", XrpoNoveltyOptions)},
    },
)
