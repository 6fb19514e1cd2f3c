"""Prompt augmentation (arXiv 2602.03190, and its released code)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from paceline.enums import Purpose
from paceline.methods.parts.prompts import rewritten
from paceline.methods.prompt_augmentation.templates import (
    PromptAugmentationOptions,
    PromptTemplate,
    chosen,
)
from paceline.platform.digest import number
from paceline.plugins import Observation, TransformContext, Variant


async def prompt_augmentation(
    observation: Observation, context: TransformContext, **options: Any
) -> Variant:
    """The question in a template that is drawn by the seed of the group, uniformly.

    All episodes of a group have the same one; held-out tasks always have that of `evaluation`.
    """
    parsed = PromptAugmentationOptions.model_validate(options)
    template = _drawn(parsed, context)
    variant = rewritten(observation, template.ask)
    meta = {"tags": list(template.tags), "answer": template.answer}
    return replace(variant, name=template.name, meta=meta)


def _drawn(options: PromptAugmentationOptions, context: TransformContext) -> PromptTemplate:
    templates = _chosen(options.templates)
    if context.purpose is Purpose.TRAIN:
        return templates[number("prompt_augmentation", context.seed) % len(templates)]
    names = [template.name for template in templates]
    return templates[names.index(options.evaluation) if options.evaluation else 0]


_chosen = cache(chosen)
