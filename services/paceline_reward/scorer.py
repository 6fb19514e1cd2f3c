"""Scores items with all parts of a job and combines them; each item fails on its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from paceline.enums import ScoreStatus
from paceline.errors import UnlistedError
from paceline.platform.fair_queue import NO_OWNER, QueueOwner
from paceline.platform.server.liveness import WorkProgress
from paceline.platform.telemetry.logs import Log
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.telemetry.tracing import Span
from paceline.plugins import Endpoints, Programs, RewardInput
from paceline.plugins.allowed import NO_TARGETS, AllowedTargets
from paceline.types import Score
from paceline_reward.job_pools import JobPools
from paceline_reward.parts import RewardPart, read_parts, stages
from paceline_reward.pool import ChildPool
from paceline_reward.scores import MAX_DETAIL, as_score, infra_error

log = Log("scorer")
_MEANS = {"programs": "sandbox", "endpoints": "endpoints"}
_SEVERITY = {
    ScoreStatus.OK: 0,
    ScoreStatus.PARSE_ERROR: 1,
    ScoreStatus.TIMEOUT: 2,
    ScoreStatus.INFRA_ERROR: 3,
}


@dataclass(frozen=True, slots=True)
class _Section:
    """A `reward:` section, and all that decides what it may name."""

    rewards_json: str
    has_code: bool
    allowed: AllowedTargets


@dataclass(frozen=True, slots=True)
class _Call:
    """What items are scored for."""

    spans: Sequence[Span]
    owner: QueueOwner
    code: str


class Scorer:
    """Runs `inline` rewards and judges in this process, others in the child pool."""

    def __init__(
        self,
        *,
        pool: ChildPool,
        job_pools: JobPools | None = None,
        programs: Callable[[QueueOwner, float], Programs] | None = None,
        endpoints: Callable[[QueueOwner, float], Endpoints] | None = None,
        allowed: AllowedTargets = NO_TARGETS,
        accepted: Callable[[str], Awaitable[AllowedTargets]] | None = None,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_cached: int = 256,
    ) -> None:
        """`allowed`: functions of installed modules that any job may name.

        `accepted` tells which others a job may name because it was accepted before they had to be
        listed.
        """
        self._metrics = metrics or Metrics()
        self._pool = pool
        self._job_pools = job_pools
        self._means = {"programs": programs, "endpoints": endpoints}
        self._clock = clock
        self._max_cached = max_cached
        self._allowed = allowed
        self._accepted = accepted
        self._parts: dict[_Section, tuple[RewardPart, ...]] = {}
        self.longest_s = 0.0  # longest timeout of a part, per item
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
        owner: QueueOwner = NO_OWNER,
        code: str = "",
    ) -> list[Score]:
        """Score items, in order; `spans` of the items, if any, are ended.

        `code` is the digest of the code that came with the job, in which the functions are that the
        job names as `module:attribute`.

        Raises:
            InvalidError: the section names a reward or an option that does not exist.
            UnlistedError: it names a function that is neither in the job's code nor listed.
        """
        parts = await self._parts_for(owner.job_id, rewards_json, has_code=bool(code))
        call = _Call(spans, owner, code)
        self._add_pending(len(items))
        try:
            scored: dict[str, list[Score]] = {}
            for stage in stages(parts):
                scored |= await self._stage(stage, items, call, scored)
            columns = [scored[part.name] for part in parts]
            scores = [combine(parts, row) for row in zip(*columns, strict=True)]
            _end(spans, scores)
            return scores
        finally:
            self._remove_pending(len(items))

    def progress(self) -> WorkProgress:
        """Items in progress and items done, including those of unfinished calls."""
        of_jobs = self._job_pools.num_scored if self._job_pools else 0
        return WorkProgress(self._pending, (self._scored, self._pool.num_scored + of_jobs))

    def load(self) -> dict[str, float]:
        """Items in progress, items scored, and seconds with at least one call in progress."""
        running_s = self._clock() - self._busy_since if self._pending else 0.0
        return {
            "pending": float(self._pending),
            "scored": float(self._scored),
            "busy_s": self._busy_s + running_s,
        }

    async def idle(self) -> None:
        """Wait until no items are in progress."""
        await self._idle.wait()

    async def _stage(
        self,
        parts: Sequence[RewardPart],
        items: Sequence[RewardInput],
        call: _Call,
        before: Mapping[str, Sequence[Score]],
    ) -> dict[str, list[Score]]:
        """Scores by part, of parts that need none of each other."""
        given = {part.name: _given(part, items, before) for part in parts}
        found = {
            part.name: self._inline(part, given[part.name], call.spans)
            for part in parts
            if part.inline
        }
        pooled = [part for part in parts if not part.inline]
        waiting = [self._pooled(part, given[part.name], call) for part in pooled]
        scores = await _all(waiting) if waiting else []
        return found | {part.name: column for part, column in zip(pooled, scores, strict=True)}

    def _inline(
        self, part: RewardPart, items: Sequence[RewardInput], spans: Sequence[Span]
    ) -> list[Score]:
        with self._timed(part, items):
            return _inline(part, items, spans)

    async def _pooled(
        self, part: RewardPart, items: Sequence[RewardInput], call: _Call
    ) -> list[Score]:
        children = _begin(part, call.spans)
        with self._timed(part, items):
            if part.judge is not None:
                scores = await self._judged(part, items, call.owner)
            elif part.is_own:
                scores = await self._sealed(part, items, call)
            else:
                scores = await self._pool.run(part, items, owner=call.owner)
        _end(children, scores)
        return scores

    async def _sealed(
        self, part: RewardPart, items: Sequence[RewardInput], call: _Call
    ) -> list[Score]:
        if self._job_pools is None:
            return [infra_error("this reward worker takes no code of jobs")] * len(items)
        return await self._job_pools.run(call.code, part, items, owner=call.owner)

    async def _judged(
        self, part: RewardPart, items: Sequence[RewardInput], owner: QueueOwner
    ) -> list[Score]:
        """Scores of a part that runs programs or asks servers, `timeout_s` for an item."""
        means, judge = self._means[part.given], part.judge
        if means is None:
            return [infra_error(f"this reward worker has no {_MEANS[part.given]}")] * len(items)
        assert judge is not None

        async def score(item: RewardInput) -> Score:
            own = {part.given: means(owner, part.timeout_s)}
            try:
                return as_score(await judge(item, **own, **part.options))
            except Exception as error:  # the supervisor boundary of one score
                log.warning("score failed", episode=item.episode_id, error=error)
                return infra_error(f"{type(error).__name__}: {error}")

        return await asyncio.gather(*map(score, items))

    @contextmanager
    def _timed(self, part: RewardPart, items: Sequence[RewardInput]) -> Generator[None]:
        started = self._clock()
        yield
        self._metrics.add("part_seconds", self._clock() - started, part=part.name)
        self._metrics.add("part_scores", len(items), part=part.name)

    async def _parts_for(
        self, job_id: str, rewards_json: str, *, has_code: bool
    ) -> tuple[RewardPart, ...]:
        try:
            return self._parts_of(_Section(rewards_json, has_code, self._allowed))
        except UnlistedError:
            if self._accepted is None or not job_id:
                raise
            accepted = self._allowed | await self._accepted(job_id)
            if accepted == self._allowed:
                raise
        return self._parts_of(_Section(rewards_json, has_code, accepted))

    def _parts_of(self, section: _Section) -> tuple[RewardPart, ...]:
        found = self._parts.get(section)
        if found is None:
            found = read_parts(
                section.rewards_json, has_code=section.has_code, allowed=section.allowed
            )
            self.longest_s = max([self.longest_s, *(part.timeout_s for part in found)])
            if len(self._parts) >= self._max_cached:
                self._parts.pop(next(iter(self._parts)))
            self._parts[section] = found
        return found

    def _add_pending(self, count: int) -> None:
        if not self._pending:
            self._busy_since = self._clock()
        self._pending += count
        self._metrics.set("scores_in_progress", self._pending)
        if self._pending:
            self._idle.clear()

    def _remove_pending(self, count: int) -> None:
        self._pending -= count
        self._metrics.set("scores_in_progress", self._pending)
        self._scored += count
        if not self._pending and not self._idle.is_set():
            self._busy_s += self._clock() - self._busy_since
            self._idle.set()


def _given(
    part: RewardPart, items: Sequence[RewardInput], before: Mapping[str, Sequence[Score]]
) -> Sequence[RewardInput]:
    """The items, with the rewards of the parts before if this one asks for them."""
    if not part.after:
        return items
    return [
        replace(item, parts={name: before[name][index].reward for name in part.after})
        for index, item in enumerate(items)
    ]


async def _all(waiting: Sequence[Any]) -> list[list[Score]]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(each) for each in waiting]
    return [task.result() for task in tasks]


def _inline(part: RewardPart, items: Sequence[RewardInput], spans: Sequence[Span]) -> list[Score]:
    children = _begin(part, spans)
    scores = inline(part, items)
    _end(children, scores)
    return scores


def _begin(part: RewardPart, spans: Sequence[Span]) -> list[Span]:
    return [span.child("reward.part", {"gen_ai.evaluation.name": part.name}) for span in spans]


def _end(spans: Sequence[Span], scores: Sequence[Score]) -> None:
    for span, score in zip(spans, scores, strict=bool(spans)):
        span.set(status=score.status, **{"gen_ai.evaluation.score.value": score.reward})
        span.end()


def inline(part: RewardPart, items: Sequence[RewardInput]) -> list[Score]:
    """Scores of a part that runs in this process."""
    assert part.inline is not None
    return [_call(part.inline, item, part.options) for item in items]


def _call(function: Callable[..., Any], item: RewardInput, options: dict[str, Any]) -> Score:
    try:
        return as_score(function(item, **options))
    except Exception as error:  # the supervisor boundary of one score
        log.exception("score failed", episode=item.episode_id)
        return infra_error(f"{type(error).__name__}: {error}")


def _says_more(score: Score, than: Score) -> bool:
    """Whether a part knows the answer better: as normalised, or at least as written."""
    if than.normalised_answer:
        return False
    return bool(score.normalised_answer or (score.raw_answer and not than.raw_answer))


def combine(parts: Sequence[RewardPart], row: Sequence[Score]) -> Score:
    """The weighted sum of an item's parts, with the worst of their statuses."""
    reward = 0.0
    part_rewards: dict[str, float] = {}
    worst = row[0]
    answer = row[0]
    for part, score in zip(parts, row, strict=True):
        reward += part.weight * score.reward
        part_rewards[part.name] = score.reward
        for name, value in score.parts.items():
            part_rewards[f"{part.name}/{name}"] = value
        if _SEVERITY[score.status] > _SEVERITY[worst.status]:
            worst = score
        if _says_more(score, answer):
            answer = score
    if worst.status is ScoreStatus.INFRA_ERROR:
        reward = 0.0
    detail = "; ".join(
        f"{part.name}: {score.detail}"
        for part, score in zip(parts, row, strict=True)
        if score.detail
    )
    return Score(
        reward=reward,
        parts=part_rewards,
        status=worst.status,
        raw_answer=answer.raw_answer,
        normalised_answer=answer.normalised_answer,
        detail=detail[:MAX_DETAIL],
    )
