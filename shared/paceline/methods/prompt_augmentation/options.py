"""Options of `prompt_augmentation`."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from paceline.errors import InvalidError
from paceline.methods.prompt_augmentation.templates import PromptTemplate, chosen
from paceline.plugins import StrictModel


class PromptAugmentationOptions(StrictModel):
    """Options of `prompt_augmentation`."""

    templates: tuple[str | PromptTemplate, ...] = Field(default=(), max_length=64)
    """Templates to draw from: names of built-in ones, or others with `name`, `text`, `tags` and
    `answer`; all built-in ones if empty."""
    evaluation: str = Field(default="", max_length=64)
    """Name of the template for held-out tasks; the first one if empty."""

    @model_validator(mode="after")
    def _can_be_used(self) -> Self:
        try:
            found = chosen(self.templates)
        except InvalidError as error:
            raise ValueError(error.message) from None
        names = [each.name for each in found]
        if self.evaluation and self.evaluation not in names:
            raise ValueError(
                f"evaluation {self.evaluation!r} is not among the templates; allowed: "
                + ", ".join(names)
            )
        return self
