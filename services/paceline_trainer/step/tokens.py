"""What is known of a rank's tokens at a step, and the batches that slots are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.methods.parts.batch import Scale, TokenBatch
from paceline_trainer.step.data import PolicyTokens
from paceline_trainer.step.model import TokenScores


@dataclass(frozen=True, slots=True)
class StepKnowledge:
    """See `paceline.methods.parts.proximal.KnownTokens`."""

    behaviour: Tensor
    num_updates: int
    score: Callable[[], Tensor]

    def current(self) -> Tensor:
        """Log-probs under the present weights."""
        return self.score()


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Log-probs [num_tokens] in the order of the columns, fixed for all updates of a step."""

    proximal: Tensor | None
    reference: Tensor | None

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
            weights=own.weights,
            keys=own.keys,
            reference=_chosen(self.reference, own),
            entropy=scores.entropy,
            temperature=own.temperature,
        )


def _chosen(values: Tensor | None, own: PolicyTokens) -> Tensor | None:
    return None if values is None else values[torch.from_numpy(own.select)]
