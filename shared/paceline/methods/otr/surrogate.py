"""The loss of OTR (arXiv 2509.26313, section 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.methods.otr import OtrOptions
from paceline.methods.parts.batch import TokenBatch, TokenLoss
from paceline.methods.parts.slots import LogitRows, reads_logits
from paceline.methods.parts.uniform import uniform


def one_token(rows: LogitRows, options: OtrOptions) -> Tensor:
    """-E[R(a) log p(a)] over tokens a from softmax(logits / kappa), which has no gradient, [n].

    R is 1 for the demonstrated token and `beta` for any other. With kappa 1 the gradient of the
    deterministic form is that of the demonstrated token's log-prob times -(1 - beta) p.
    """
    logprobs = torch.log_softmax(rows.logits, -1)
    drawn_from = torch.softmax(rows.logits.detach() / options.kappa, -1)
    target = rows.targets[:, None]
    if options.mode == "sampled":
        drawn = _draw(drawn_from, rows, options.samples)
        rewards = torch.where(drawn == target, 1.0, options.beta)
        return -(rewards * logprobs.gather(-1, drawn)).mean(-1)
    weighted = drawn_from * logprobs
    demonstrated = weighted.gather(-1, target).squeeze(-1)
    return -(demonstrated * (1.0 - options.beta) + options.beta * weighted.sum(-1))


@reads_logits(one_token)
def otr(tokens: TokenBatch, options: OtrOptions) -> TokenLoss:
    """The loss of each token, times its advantage; those with a negative advantage do not train."""
    del options
    assert tokens.of_logits is not None
    return TokenLoss(tokens.of_logits * tokens.advantages.clamp(min=0.0))


def _draw(probabilities: Tensor, rows: LogitRows, samples: int) -> Tensor:
    """Tokens [n, samples] from these distributions; the same for every split of the batch."""
    sums = probabilities.double().cumsum(-1)
    points = uniform(rows.keys, rows.step, samples) * sums[:, -1:]
    return torch.searchsorted(sums, points, right=True).clamp(max=sums.shape[-1] - 1)
