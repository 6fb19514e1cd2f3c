"""PuzzleCraft's curriculum weight (arXiv 2512.14944 v2, section on curriculum; d_pi^gamma)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from paceline.methods.parts.group_statistics import check, members
from paceline.methods.parts.previous import episode_advantages_before
from paceline.plugins import Advantages, Context, EpisodeBatch


def puzzlecraft(
    batch: EpisodeBatch,
    context: Context,
    *,
    scale: float = 4.0,
    exponent: float = 0.5,
    dispersion: str = "entropy",
    choices: int | None = None,
) -> Advantages:
    """The advantages of the part before times `scale` d (1 - d) dispersion^`exponent`, [N].

    d is the mean reward of the group, clipped to 0 to 1.

    Raises:
        InvalidError: no part comes before, or a reward is not finite.
    """
    del context
    before, rewards = episode_advantages_before(batch), check(batch.rewards)
    weights = np.zeros(len(rewards))
    for group in members(batch.groups):
        answers = [batch.answers[int(index)] for index in group]
        spread = distinct(answers) if dispersion == "distinct" else entropy(answers, choices)
        mean = min(max(float(rewards[group].mean()), 0.0), 1.0)
        weights[group] = scale * mean * (1.0 - mean) * spread**exponent
    notes = {"curriculum_weight": float(weights.mean()) if len(weights) else 0.0}
    return Advantages(before * weights, weights=batch.weights, notes=notes)


def entropy(answers: Sequence[str], choices: int | None) -> float:
    """Entropy of answers over its maximum for `choices`; for None see the option, 0 to 1."""
    counts = Counter(answers)
    if choices is None:
        return math.log(len(counts)) / math.log(len(answers)) if len(answers) > 1 else 0.0
    shares = [count / len(answers) for count in counts.values()]
    return min(-sum(share * math.log(share) for share in shares) / math.log(choices), 1.0)


def distinct(answers: Sequence[str]) -> float:
    """0 if all answers are equal, 1 if all differ."""
    return (len(set(answers)) - 1) / (len(answers) - 1) if len(answers) > 1 else 0.0
