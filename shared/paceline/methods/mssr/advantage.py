"""MSSR's stored baseline (arXiv 2512.18215, section 3; release: verl/trainer/core_algos.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.methods.parts.group_statistics import check
from paceline.plugins import Advantages, Context, EpisodeBatch, GroupOutcome

_FLOOR = 1e-6  # of the variance
Counts = tuple[float, float]  # successes and failures, both fading


def mssr(
    batch: EpisodeBatch,
    context: Context,
    *,
    least: float = 0.875,
    most: float = 0.96,
    target_kl: float = 0.01,
    rule: str = "monotone",
    metric: str = "kl_behaviour",
    window: int = 20,
    initial: float = 0.5,
    success: float = 0.5,
) -> Advantages:
    """Reward minus the success rate of its task before this batch, normalised over the batch, [N].

    Memory: by task, the fading numbers of successes and failures.
    """
    rewards = check(batch.rewards)
    unseen = (initial / (1.0 - least), (1.0 - initial) / (1.0 - least))
    rates = np.array([_rate(_known(context.memory, task, unseen)) for task in batch.tasks.tolist()])
    off = rewards - rates
    if len(off) > 1:
        off = (off - off.mean()) / math.sqrt(max(float(off.var()), _FLOOR))
    keep = forgetting(mean_kl(context.metrics[-window:], metric), target_kl, least, most, rule=rule)
    changed: dict[str, Counts] = {}
    for outcome in context.outcomes:
        key = str(outcome.task)
        before = changed.get(key) or _known(context.memory, outcome.task, unseen)
        changed[key] = _updated(before, outcome, keep=keep, success=success)
    notes = {"baseline": float(rates.mean()) if len(rates) else 0.0, "forgetting": keep}
    return Advantages(off, memory=changed, notes=notes)


def forgetting(kl: float | None, target: float, least: float, most: float, *, rule: str) -> float:
    """The factor by which the weight of old outcomes falls; the midpoint if no KL is known."""
    if kl is None:
        return (least + most) / 2.0
    fraction = min(max(kl, 0.0) / target, 1.0)
    if rule == "monotone" or kl > target:
        return most - fraction * (most - least)
    return least + fraction * (most - least)


def mean_kl(metrics: Sequence[Mapping[str, float]], name: str) -> float | None:
    """The mean of a number over the steps that have it."""
    values = [float(row[name]) for row in metrics if isinstance(row.get(name), (int, float))]
    return float(np.mean(values)) if values else None


def _known(memory: Mapping[str, Any], task: int, unseen: Counts) -> Counts:
    counts = memory.get(str(task))
    return unseen if counts is None else (float(counts[0]), float(counts[1]))


def _rate(counts: Counts) -> float:
    return counts[0] / (counts[0] + counts[1])


def _updated(counts: Counts, outcome: GroupOutcome, *, keep: float, success: float) -> Counts:
    good, bad = counts
    for reward in outcome.rewards:
        good, bad = keep * good + (reward > success), keep * bad + (reward <= success)
    return good, bad
