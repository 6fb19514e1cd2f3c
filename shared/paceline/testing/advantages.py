"""Contract tests for advantages; need numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config.needs import GROUP
from paceline.config.options import options_source
from paceline.plugins import Advantage, Context, EpisodeBatch, Turns, declared
from paceline.testing.common import expect, resolved

Floats = NDArray[np.float64]
BATCHES: tuple[tuple[Sequence[float], Sequence[int]], ...] = (
    ((0.0, 1.0, 1.0, 0.0), (0, 0, 1, 1)),
    ((1.0, 1.0, 1.0, 1.0), (0, 0, 0, 0)),
    ((1e9, -1e9, 1e-9), (2, 2, 2)),
    ((0.1, 0.2, 0.3, 0.4, 0.5), (7, 3, 7, 3, 7)),
)
ALONE: tuple[Sequence[float], Sequence[int]] = ((0.5,), (0,))


def fulfils_the_contract(plugin: str | Advantage, options: Mapping[str, Any] | None = None) -> None:
    """Check for one finite number per episode, whatever the group numbers, and unchanged inputs.

    An advantage that does not declare that it needs groups is also called with a single episode.
    All batches have every column: parts `first` and `second`, a turn for each episode, and
    advantages of a part before.
    """
    estimate: Advantage = resolved("advantages", plugin)
    given = dict(options or {})
    told = (
        options_source("advantages", plugin, import_plugin=True)
        if isinstance(plugin, str)
        else plugin
    )
    alone = () if GROUP in declared(told).needs_with(given) else (ALONE,)
    for rewards, groups in (*BATCHES, *alone):
        found = _estimated(estimate, rewards, groups, given)
        renamed = _estimated(estimate, rewards, [100 - each for each in groups], given)
        expect(np.allclose(found, renamed), f"renumbering {groups} changes {found} to {renamed}")


def episode_batch(
    rewards: Sequence[float],
    groups: Sequence[int],
    *,
    lengths: Sequence[int] | None = None,
    tasks: Sequence[int] | None = None,
    answers: Sequence[str] | None = None,
    parts: Mapping[str, Sequence[float]] | None = None,
    logprobs: Sequence[float] | None = None,
    turns: Sequence[tuple[int, int, float]] = (),
    advantages: Sequence[float] | None = None,
) -> EpisodeBatch:
    """A batch of episodes.

    `turns` has episode, policy tokens and reward of each turn, in order; if there are any, lengths
    follow from them. Otherwise an episode has one policy token unless `lengths` says more.
    """
    count = len(rewards)
    if turns:
        lengths = [sum(n for e, n, _ in turns if e == i) for i in range(count)]
    own_lengths = np.ones(count, np.int64) if lengths is None else np.array(lengths, np.int64)
    return EpisodeBatch(
        groups=np.array(groups, np.int64),
        tasks=np.array(groups if tasks is None else tasks, np.int64),
        rewards=np.array(rewards, np.float64),
        lengths=own_lengths,
        truncated=np.zeros(count, np.bool_),
        answers=tuple(answers or [""] * count),
        parts={name: np.array(each, np.float64) for name, each in (parts or {}).items()},
        advantages=None if advantages is None else np.array(advantages, np.float64),
        logprobs=-np.ones(own_lengths.sum()) if logprobs is None else np.array(logprobs),
        turns=_turns(turns, count),
    )


def _turns(turns: Sequence[tuple[int, int, float]], count: int) -> Turns:
    counts = np.array([tokens for _, tokens, _ in turns], np.int64)
    ends = np.cumsum(counts)
    episodes = np.array([episode for episode, _, _ in turns], np.int64)
    seen = [0] * count
    indices: list[int] = []
    for episode in episodes.tolist():
        indices.append(seen[episode])
        seen[episode] += 1
    none = np.zeros(len(turns), np.bool_)
    return Turns(
        episodes=episodes,
        indices=np.array(indices, np.int64),
        starts=ends - counts,
        ends=ends,
        rewards=np.array([reward for _, _, reward in turns], np.float64),
        matched=none,
        patched=none.copy(),
    )


def _columns(rewards: Sequence[float], groups: Sequence[int]) -> EpisodeBatch:
    flags = [float(index % 2) for index in range(len(rewards))]
    return episode_batch(
        rewards,
        groups,
        turns=[(index, index + 1, reward) for index, reward in enumerate(rewards)],
        parts={"first": rewards, "second": flags},
        advantages=rewards,
    )


def _estimated(
    estimate: Advantage, rewards: Sequence[float], groups: Sequence[int], options: dict[str, Any]
) -> Floats:
    batch, kept = _columns(rewards, groups), _columns(rewards, groups)
    answer = estimate(batch, Context(step=0, total_steps=10), **options)
    found = np.asarray(getattr(answer, "values", answer), dtype=np.float64)
    unchanged = all(
        np.array_equal(getattr(batch, name), getattr(kept, name))
        for name in ("rewards", "groups", "tasks", "lengths", "truncated", "logprobs")
    )
    expect(unchanged, "it modifies its input arrays")
    shapes = (batch.rewards.shape, (int(batch.lengths.sum()),))
    expect(found.shape in shapes, f"shape {found.shape} for {len(rewards)} episodes")
    finite = np.abs(found) <= np.finfo(np.float32).max
    expect(finite.all(), f"{found} for rewards {rewards}; expected finite float32 numbers")
    return found
