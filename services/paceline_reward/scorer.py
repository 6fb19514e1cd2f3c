"""Scores items by all parts of a job and combines them; items fail one by one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from paceline.interfaces import RewardInput
from paceline.logs import Log
from paceline.metrics import Metrics
from paceline.progress import Pulse
from paceline.tracing import Span
from paceline.types import Score, VerifierStatus
from paceline_reward.parts import Part, read_parts
from paceline_reward.pool import Pool
from paceline_reward.scores import MAX_DETAIL, as_score, infra_error
from paceline_reward.turns import NOBODY, Owner

log = Log("scorer")
_SEVERITY = {
    VerifierStatus.OK: 0,
    VerifierStatus.PARSE_ERROR: 1,
    VerifierStatus.TIMEOUT: 2,
    VerifierStatus.INFRA_ERROR: 3,
}


class Scorer:
    """Runs trusted built-ins here and everything else in the child pool."""

    def __init__(
        self,
        *,
        pool: Pool,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_cached: int = 256,
    ) -> None:
        self._metrics = metrics or Metrics()
        self._pool = pool
        self._clock = clock
        self._max_cached = max_cached
        self._parts: dict[str, tuple[Part, ...]] = {}
        self.longest_s = 0.0  # that any part may take for an item
        self._pending = 0
        self._scored = 0
        self._busy_s = 0.0
        self._busy_since = 0.0
        self._idle = asyncio.Event()
        self._idle.set()

    async def score(
        self,
        rewards_json: str,
        items: Sequence[RewardInput],
        spans: Sequence[Span] = (),
        *,
        owner: Owner = NOBODY,
    ) -> list[Score]:
        """One score for each item, in order; `spans` of items, if any, end with it.

        Raises:
            InvalidError: the section names a reward or an option that does not exist.
        """
        parts = self._parts_of(rewards_json)
        self._enter(len(items))
        try:
            columns = [self._inline(part, items, spans) if part.inline else None for part in parts]
            waiting = [
                self._pooled(part, items, spans, owner)
                for part, column in zip(parts, columns, strict=True)
                if column is None
            ]
            pooled = iter(await _all(waiting) if waiting else [])
            whole = [column if column is not None else next(pooled) for column in columns]
            scores = [combine(parts, row) for row in zip(*whole, strict=True)]
            _end(spans, scores)
            return scores
        finally:
            self._leave(len(items))

    def pulse(self) -> Pulse:
        """Items being scored, and what comes of them; also of those within one call."""
        return Pulse(self._pending, (self._scored, self._pool.num_scored))

    def load(self) -> dict[str, float]:
        """Items being scored, items scored, and seconds with at least one call under way."""
        running_s = self._clock() - self._busy_since if self._pending else 0.0
        return {
            "pending": float(self._pending),
            "scored": float(self._scored),
            "busy_s": self._busy_s + running_s,
        }

    async def idle(self) -> None:
        """Wait until nothing is being scored."""
        await self._idle.wait()

    def _inline(
        self, part: Part, items: Sequence[RewardInput], spans: Sequence[Span]
    ) -> list[Score]:
        with self._timed(part, items):
            return _inline(part, items, spans)

    async def _pooled(
        self, part: Part, items: Sequence[RewardInput], spans: Sequence[Span], owner: Owner
    ) -> list[Score]:
        below = _begin(part, spans)
        with self._timed(part, items):
            scores = await self._pool.run(part, items, owner=owner)
        _end(below, scores)
        return scores

    @contextmanager
    def _timed(self, part: Part, items: Sequence[RewardInput]) -> Generator[None]:
        started = self._clock()
        yield
        self._metrics.add("part_seconds", self._clock() - started, part=part.name)
        self._metrics.add("part_scores", len(items), part=part.name)

    def _parts_of(self, rewards_json: str) -> tuple[Part, ...]:
        found = self._parts.get(rewards_json)
        if found is None:
            found = read_parts(rewards_json)
            self.longest_s = max([self.longest_s, *(part.timeout_s for part in found)])
            if len(self._parts) >= self._max_cached:
                self._parts.pop(next(iter(self._parts)))
            self._parts[rewards_json] = found
        return found

    def _enter(self, count: int) -> None:
        if not self._pending:
            self._busy_since = self._clock()
        self._pending += count
        self._metrics.set("scoring", self._pending)
        if self._pending:
            self._idle.clear()

    def _leave(self, count: int) -> None:
        self._pending -= count
        self._metrics.set("scoring", self._pending)
        self._scored += count
        if not self._pending and not self._idle.is_set():
            self._busy_s += self._clock() - self._busy_since
            self._idle.set()


async def _all(waiting: Sequence[Any]) -> list[list[Score]]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in waiting]
    return [task.result() for task in tasks]


def _inline(part: Part, items: Sequence[RewardInput], spans: Sequence[Span]) -> list[Score]:
    below = _begin(part, spans)
    scores = inline(part, items)
    _end(below, scores)
    return scores


def _begin(part: Part, spans: Sequence[Span]) -> list[Span]:
    return [span.child("reward.part", {"gen_ai.evaluation.name": part.name}) for span in spans]


def _end(spans: Sequence[Span], scores: Sequence[Score]) -> None:
    for span, score in zip(spans, scores, strict=bool(spans)):
        span.set(status=score.status, **{"gen_ai.evaluation.score.value": score.reward})
        span.end()


def inline(part: Part, items: Sequence[RewardInput]) -> list[Score]:
    """Scores of a trusted built-in."""
    assert part.inline is not None
    return [_call(part.inline, item, part.options) for item in items]


def _call(function: Callable[..., Any], item: RewardInput, options: dict[str, Any]) -> Score:
    try:
        return as_score(function(item, **options))
    except Exception as error:  # the boundary of one score
        log.exception("score failed", episode=item.episode_id)
        return infra_error(f"{type(error).__name__}: {error}")


def combine(parts: Sequence[Part], row: Sequence[Score]) -> Score:
    """The weighted sum; the worst status of the parts is the status of the whole."""
    reward = 0.0
    points: dict[str, float] = {}
    worst = row[0]
    answered = row[0]
    for part, score in zip(parts, row, strict=True):
        reward += part.weight * score.reward
        points[part.name] = score.reward
        for name, value in score.parts.items():
            points[f"{part.name}/{name}"] = value
        if _SEVERITY[score.status] > _SEVERITY[worst.status]:
            worst = score
        if score.raw_answer and not answered.raw_answer:
            answered = score
    if worst.status is VerifierStatus.INFRA_ERROR:
        reward = 0.0
    detail = "; ".join(
        f"{part.name}: {score.detail}"
        for part, score in zip(parts, row, strict=True)
        if score.detail
    )
    return replace(
        answered, reward=reward, parts=points, status=worst.status, detail=detail[:MAX_DETAIL]
    )
