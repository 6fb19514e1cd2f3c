"""Rejects tokens or sequences by their ratio of proximal to behaviour policy."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.methods.mis import MisOptions
from paceline.methods.parts.batch import TokenBatch
from paceline.methods.parts.surrogates import log_ratio, sequence_log_ratio


def mis(tokens: TokenBatch, options: MisOptions) -> Tensor:
    """1 where the ratio is within bounds, else 0."""
    log_ratios = log_ratio(tokens.old, tokens.behaviour)
    compared = log_ratios
    if options.level != "token":
        compared = sequence_log_ratio(log_ratios, tokens, mean=options.level == "geometric")
    lower, upper = options.bounds
    ratio = compared.exp()
    keep = ((ratio >= lower) & (ratio <= upper)).to(ratio.dtype)
    if options.veto is not None:
        keep = keep * _without_veto(log_ratios.exp() < options.veto, tokens)
    return keep


def _without_veto(vetoes: Tensor, tokens: TokenBatch) -> Tensor:
    """1 for the tokens of sequences in which no token has a veto."""
    counts = torch.zeros(tokens.num_sequences, device=vetoes.device)
    counts = counts.index_add(0, tokens.sequences, vetoes.to(counts.dtype))
    return (counts == 0)[tokens.sequences].to(torch.float32)
