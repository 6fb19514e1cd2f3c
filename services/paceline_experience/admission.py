"""How many groups may be let in: pure arithmetic on the ledger's counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds admission."""

    batch_groups: int
    group_size: int
    max_staleness: int
    max_in_flight: int | None
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Load:
    """What is there: groups `accepted` are ready or later and not dropped.

    `step` is the one whose weights new episodes are sampled with: it lags behind the trainer's
    while a version is on its way, and what is admitted meanwhile would end one step too old.
    """

    step: int
    accepted_groups: int
    open_groups: int
    open_episodes: int  # queued or leased
    payload_bytes: int
    episode_bytes: float = 0.0  # mean payload of an episode so far


def serving_step(ages: Iterable[int], *, newest: int, step: int, max_staleness: int) -> int:
    """The step whose weights new episodes will be sampled with.

    `ages` are the steps of the versions that rollout workers answer with, `newest` that of the
    last publication (which counts while no worker is known), `step` the trainer's. Workers beyond
    the bound make nothing that can be trained, so they hold up nobody.
    """
    known = list(ages)
    fresh = [age for age in known if step - age <= max_staleness]
    return min(step, min(fresh) if fresh else max(known, default=newest))


def bound(limits: Limits, step: int) -> int:
    """Groups that can still be used: (S + step + 1) * B."""
    return (limits.max_staleness + step + 1) * limits.batch_groups


def staleness_headroom(limits: Limits, load: Load) -> int:
    """Groups that staleness alone would let in."""
    return max(0, bound(limits, load.step) - load.accepted_groups - load.open_groups)


def over_budget(limits: Limits, load: Load) -> bool:
    """Whether payloads, and those that are on their way, fill the budget."""
    coming = load.open_groups * limits.group_size * load.episode_bytes
    return load.payload_bytes + coming >= limits.payload_bytes


def headroom(limits: Limits, load: Load) -> int:
    """Groups that may be admitted at this moment."""
    groups = staleness_headroom(limits, load)
    if limits.max_in_flight is not None:
        room = (limits.max_in_flight - load.open_episodes) // limits.group_size
        least = 1 if load.open_episodes == 0 else 0  # a bound below one group must not block
        groups = min(groups, max(room, least))
    return 0 if over_budget(limits, load) else groups
