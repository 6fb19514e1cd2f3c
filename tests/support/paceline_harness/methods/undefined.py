"""A surrogate whose loss is NaN in some updates, for tests of what is not finite."""

from __future__ import annotations

import itertools

import torch

from paceline.methods.parts.batch import TokenBatch, TokenLoss
from paceline.methods.parts.slots import planned
from paceline.methods.parts.whole_batch import WholeBatch
from paceline_harness.methods.undefined_options import UndefinedOptions

_updates = itertools.count()  # of this trainer: a plan is made once per update


def _lowest(whole: WholeBatch, options: UndefinedOptions) -> float | None:
    """The lowest log-prob of the update; None if its loss is finite."""
    if not options.first <= next(_updates) <= options.last:
        return None
    return -whole.max(-whole.tokens.behaviour)


@planned(_lowest, needs_logprobs=False)
def undefined(tokens: TokenBatch, lowest: float | None, options: UndefinedOptions) -> TokenLoss:
    """-A log p; in the chosen updates NaN for the tokens with the lowest sampled log-prob."""
    del options
    loss = -tokens.advantages * tokens.logprobs
    if lowest is None:
        return TokenLoss(loss)
    return TokenLoss(torch.where(tokens.behaviour == lowest, torch.nan, loss))
