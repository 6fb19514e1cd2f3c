"""How many groups may be admitted: pure arithmetic on the ledger's counts.

This keeps samples within the staleness bound; `staleness.py` has the rest of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Settings that bound admission."""

    batch_groups: int
    group_size: int  # mean, if groups differ
    max_staleness: int
    max_in_flight: int | None
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class AdmissionLoad:
    """Current load: accepted groups are those that are or were ready and not dropped.

    `step` is the one whose weights new episodes are sampled with: it lags behind the trainer's
    while a version is in transfer, and what is admitted meanwhile would end one step too old.
    """

    step: int
    accepted_groups: int
    open_groups: int
    open_episodes: int  # queued or leased
    payload_bytes: int
    episode_bytes: float = 0.0  # mean payload of an episode so far


def serving_step(ages: Iterable[int], *, newest: int, step: int, max_staleness: int) -> int:
    """The step whose weights new episodes will be sampled with.

    `ages` are the steps of the versions that rollout workers sample with, `newest` that of the
    last publication (used while no worker is known), `step` the trainer's. Workers too stale to
    produce trainable tokens are ignored, so they hold up nobody.
    """
    known = list(ages)
    fresh = [age for age in known if step - age <= max_staleness]
    return min(step, min(fresh) if fresh else max(known, default=newest))


def bound(limits: AdmissionLimits, step: int) -> int:
    """Number of groups that can be used up to this step: (S + step + 1) * B."""
    return (limits.max_staleness + step + 1) * limits.batch_groups


def staleness_headroom(limits: AdmissionLimits, load: AdmissionLoad) -> int:
    """Groups that staleness alone would admit."""
    return max(0, bound(limits, load.step) - load.accepted_groups - load.open_groups)


def over_budget(limits: AdmissionLimits, load: AdmissionLoad) -> bool:
    """Whether payloads, with the expected ones of open groups, fill the budget."""
    expected = load.open_groups * limits.group_size * load.episode_bytes
    return load.payload_bytes + expected >= limits.payload_bytes


def headroom(limits: AdmissionLimits, load: AdmissionLoad) -> int:
    """Groups that may be admitted now."""
    groups = staleness_headroom(limits, load)
    if limits.max_in_flight is not None:
        free = (limits.max_in_flight - load.open_episodes) // limits.group_size
        min_groups = 1 if load.open_episodes == 0 else 0  # a bound below one group must not block
        groups = min(groups, max(free, min_groups))
    return 0 if over_budget(limits, load) else groups
