"""What is known of a rank's tokens at a step, and the batches that slots are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.methods.parts.batch import Scale, TokenBatch
from paceline.methods.parts.proximal import Between
from paceline_trainer.step.data import PolicyTokens
from paceline_trainer.step.model import TokenScores


@dataclass(frozen=True, slots=True)
class StepKnowledge:
    """See `paceline.methods.parts.proximal.KnownTokens`."""

    behaviour: Tensor
    ages: Tensor
    num_updates: int
    current: Callable[[], Tensor]
    sampled: Callable[[], Tensor]
    averaged: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Columns [num_tokens] that are fixed for all updates of a step."""

    centre: Between | Tensor | None
    reference: Tensor | None
    ages: Tensor
    step: int = 0
    total_steps: int = 1

    @property
    def proximal(self) -> Tensor | None:
        """Log-probs of the proximal policy, as far as they are fixed."""
        return self.centre.logprobs if isinstance(self.centre, Between) else self.centre

    @property
    def between(self) -> Tensor | None:
        """Shares by which other log-probs follow the current policy."""
        return self.centre.share if isinstance(self.centre, Between) else None

    def batch(self, own: PolicyTokens, scores: TokenScores, scale: Scale) -> TokenBatch:
        """What slots are given: `own` tokens, and their scores under the present weights."""
        return TokenBatch(
            logprobs=scores.logprobs,
            behaviour=own.behaviour,
            advantages=own.advantages,
            sequences=own.sequences,
            num_sequences=own.num_sequences,
            scale=scale,
            proximal=_chosen(self.proximal, own),
            between=_chosen(self.between, own),
            ages=_chosen(self.ages, own),
            weights=own.weights,
            keys=own.keys,
            replaced=own.replaced,
            reference=_chosen(self.reference, own),
            entropy=scores.entropy,
            temperature=own.temperature,
            step=self.step,
            total_steps=self.total_steps,
        )


def _chosen(values: Tensor | None, own: PolicyTokens) -> Tensor | None:
    return None if values is None else values[torch.from_numpy(own.select)]
