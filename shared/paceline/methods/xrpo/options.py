"""Options of the parts of XRPO; no numpy here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.plugins import StrictModel, declares


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
