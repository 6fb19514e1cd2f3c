"""GDPO (arXiv 2601.05242, section 3)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from paceline.errors import InvalidError
from paceline.methods.parts.group_statistics import (
    Floats,
    check,
    index_of,
    weighted_moments,
    z_by,
)
from paceline.plugins import Context, EpisodeBatch


def gdpo(
    batch: EpisodeBatch,
    context: Context,
    *,
    weights: Mapping[str, float] | None = None,
    over: str = "episodes",
    eps: float = 1e-4,
) -> Floats:
    """Each part normalised by group, their weighted sum by batch, [N].

    With a single part this is GRPO, without the second normalisation.

    Raises:
        InvalidError: a weight names a part that no episode has.
    """
    del context
    index = index_of(batch.groups)
    weights = weights or {}
    if unknown := sorted(weights.keys() - batch.parts.keys()) if batch.parts else []:
        raise InvalidError(
            f"weights.{unknown[0]}: there is no such part; parts: {', '.join(batch.parts)}"
        )
    if len(batch.parts) < 2:
        return z_by(check(batch.rewards), index, unbiased=True, eps=eps)
    total = np.zeros(len(index))
    for name, values in batch.parts.items():
        known = ~np.isnan(values)  # an episode without this part neither gains nor loses by it
        own = z_by(values[known], index[known], unbiased=True, eps=eps)
        total[known] += weights.get(name, 1.0) * own
    counts = batch.lengths.astype(np.float64) if over == "tokens" else np.ones(len(total))
    mean, variance = weighted_moments(total, counts)
    return (total - mean) / (np.sqrt(variance) + eps) if variance > 0 else np.zeros_like(total)
