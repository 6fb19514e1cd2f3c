"""GAPO (arXiv 2510.21830, section 3)."""

from __future__ import annotations

import math

import numpy as np

from paceline.methods.parts.group_statistics import Floats, check, members
from paceline.plugins import Context, EpisodeBatch

_EPS = 1e-6


def gapo(
    batch: EpisodeBatch,
    context: Context,
    *,
    tau: float = 0.5,
    center: str = "median",
    scale: bool = True,
) -> Floats:
    """(R - Q) / (s + 1e-6), with Q the centre of the densest interval of the group, [N]."""
    del context
    rewards = check(batch.rewards)
    advantages = np.zeros_like(rewards)
    for own in members(batch.groups):
        advantages[own] = _of_group(rewards[own], tau, center, scale)
    return advantages


def _of_group(rewards: Floats, tau: float, center: str, scale: bool) -> Floats:
    if len(rewards) < 2 or np.ptp(rewards) == 0:
        return np.zeros_like(rewards)
    inside = densest(rewards, math.ceil(len(rewards) * tau))
    off = rewards - (np.median(inside) if center == "median" else inside.mean())
    if not scale:
        return off
    return off / (math.sqrt((off * off).sum() / (len(rewards) - 1)) + _EPS)


def densest(rewards: Floats, size: int) -> Floats:
    """The `size` neighbouring rewards with the smallest spread, the lowest of equals."""
    ordered = np.sort(rewards)
    spreads = ordered[size - 1 :] - ordered[: len(ordered) - size + 1]
    start = int(np.argmin(spreads))
    return ordered[start : start + size]
