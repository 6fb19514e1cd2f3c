"""An objective: the loss of a micro-batch of tokens."""

from __future__ import annotations

from paceline.methods.parts.batch import Loss, TokenBatch
from paceline.methods.parts.surrogates import log_ratio
from paceline_example.options import ReinforceOptions


def reinforce(batch: TokenBatch, options: ReinforceOptions) -> Loss:
    """`-A w log p`, averaged over tokens, with w = min(policy / behaviour, cap) held fixed.

    It divides by the tokens of the whole update (`batch.scale`), so that losses of micro-batches
    and ranks add up.
    """
    weights = log_ratio(batch.logprobs.detach(), batch.behaviour).exp().clamp(max=options.cap)
    tokens = -batch.advantages * weights * batch.logprobs
    value = tokens.sum() * (batch.scale.world / max(batch.scale.tokens, 1))
    return Loss(value, sums={"importance": weights.sum()})
