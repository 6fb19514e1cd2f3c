"""Trajectories that were collected elsewhere enter the pool of a job's replay."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from paceline.enums import Purpose, TokenSource
from paceline.errors import InvalidError, StateError
from paceline.errors.wording import refusal
from paceline.platform.digest import number
from paceline.platform.text import clipped
from paceline.plugins import TaskSource
from paceline.types import (
    SamplingParams,
    Score,
    TokenSpan,
    Trajectory,
    Transcript,
    VersionRun,
)
from paceline_experience.ledger.context import LedgerContext
from paceline_experience.ledger.generation.submission import Submission, submission
from paceline_experience.ledger.groups import Groups
from paceline_experience.ledger.replay.lookup import TaskLookup
from paceline_experience.ledger.state import LedgerState

MAX_ROWS, MAX_IMPORT_CHARS = 1024, 1 << 20  # of one call
_UNKNOWN_VERSION = -1
_MAX_PROBLEMS, _PROBLEM_BYTES = 20, 300
_NOT_ABOVE = 1e-4  # rounding of log-probs


@checked_dataclass(frozen=True)
class _Span:
    start: int
    end: int
    source: TokenSource


@checked_dataclass(frozen=True)
class _Transcript:
    tokens: Annotated[tuple[int, ...], Field(min_length=1)]
    spans: Annotated[tuple[_Span, ...], Field(min_length=1)]
    logprobs: tuple[float, ...]
    branch_token: int = 0


@checked_dataclass(frozen=True)
class _Score:
    reward: float
    parts: dict[str, float] = field(default_factory=dict[str, float])
    normalised_answer: str = ""


@checked_dataclass(frozen=True)
class _Sampling:
    temperature: Annotated[float, Field(gt=0.0, le=100.0)]


@checked_dataclass(frozen=True)
class _Row:
    """What is read of a line; a job's own exports have more."""

    task_id: str
    transcripts: Annotated[tuple[_Transcript, ...], Field(min_length=1, max_length=64)]
    score: _Score
    sampling: _Sampling | None = None
    truncated: bool = False


_ROWS = TypeAdapter(_Row)


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What became of the lines of a file."""

    num_stored: int
    num_refused: int
    problems: tuple[str, ...]  # of the first lines that were refused


class Imports:
    """Checks lines one by one, and stores what can be trained."""

    def __init__(self, *, core: LedgerContext, groups: Groups, tasks: TaskSource) -> None:
        self._core, self._groups = core, groups
        self._lookup = TaskLookup(tasks, job_id=core.job_id)

    async def add(self, lines: Sequence[str], *, vocabulary: int) -> ImportReport:
        """Store the trajectories of these lines; the same line is stored once.

        Args:
            lines: each a trajectory as JSON.
            vocabulary: token ids are below it.

        Raises:
            InvalidError: the job has no replay, or too many tasks to find those of the lines, or
                there are too many lines.
            StateError: the job is over.
            DeadlineError: its tasks are being looked through; repeat the call.
        """
        if self._core.spec.experience.replay is None:
            raise InvalidError("experience.replay: the job has none, so nothing can be imported")
        if len(lines) > MAX_ROWS:
            raise InvalidError(f"lines: {len(lines)}; at most {MAX_ROWS} at a time")
        async with self._core.transaction() as state:
            _check_goes_on(state)
        problems: dict[int, str] = {}
        rows: dict[int, _Row] = {}
        for place, line in enumerate(lines, 1):
            with _noted(problems, place):
                rows[place] = _row(line)
        positions = await self._lookup.positions({row.task_id for row in rows.values()})
        found: list[tuple[int, Submission]] = []
        for place, row in rows.items():
            with _noted(problems, place):
                if (position := positions.get(row.task_id)) is None:
                    raise InvalidError(f"task_id: {row.task_id!r} is no task of the job")
                found.append((position, self._checked(lines[place - 1], row, vocabulary)))
        async with self._core.transaction() as state:
            _check_goes_on(state)
            stored = await self._groups.bring(found)
        told = [problems[place] for place in sorted(problems)[:_MAX_PROBLEMS]]
        return ImportReport(stored, len(problems), tuple(told))

    def close(self) -> None:
        """End what goes on without a call."""
        self._lookup.close()

    def let_go(self) -> None:
        """Nothing is imported any more: the files of its tasks are closed."""
        self._lookup.let_go()

    def _checked(self, line: str, row: _Row, vocabulary: int) -> Submission:
        """The trajectory of a line.

        Raises:
            InvalidError: it cannot be trained in this job.
        """
        if not math.isfinite(row.score.reward):
            raise InvalidError(f"score.reward: {row.score.reward} is not finite")
        most = self._core.spec.sampling.max_context
        for each in row.transcripts:
            _check(each, vocabulary=vocabulary, max_context=most)
        job = self._core.spec.sampling
        made = Trajectory(
            group_id=f"{self._core.job_id}.imported",
            index=number(line) % (1 << 31),
            attempt=1,
            task_id=row.task_id,
            purpose=Purpose.TRAIN,
            transcripts=tuple(map(_transcript, row.transcripts)),
            score=Score(
                row.score.reward,
                dict(row.score.parts),
                normalised_answer=row.score.normalised_answer,
            ),
            sampling=SamplingParams(
                max_tokens=job.max_tokens,
                temperature=row.sampling.temperature if row.sampling else job.temperature,
            ),
            truncated=row.truncated,
        )
        stored = submission(
            made,
            limits=self._core.limits,
            compress_over_bytes=self._groups.compress_over,
            waves=False,
        )
        if stored.report.result is None:
            raise InvalidError(stored.report.detail)
        return stored


def vocabulary_of(config: bytes) -> int:
    """The number of token ids, from a model's `config.json`; raises `InvalidError`."""
    fields = json.loads(config)
    size = fields.get("vocab_size") or fields.get("text_config", {}).get("vocab_size")
    if not isinstance(size, int):
        raise InvalidError("the model's config.json has no vocab_size")
    return size


def lines_of(text: str) -> list[str]:
    """Its lines but blank ones; characters that separate lines elsewhere are part of JSON texts."""
    return [line for line in text.split("\n") if line.strip()]


def _check_goes_on(state: LedgerState) -> None:
    """Raise `StateError` if the job is about to end."""
    if state.closed or state.stop is not None:
        raise StateError("the job is about to end: nothing is replayed any more")


@contextmanager
def _noted(problems: dict[int, str], place: int) -> Generator[None]:
    """A problem inside is that of the line at this place, from 1."""
    try:
        yield
    except InvalidError as error:
        problems[place] = clipped(f"line {place}: {error.message}", _PROBLEM_BYTES)


def _row(line: str) -> _Row:
    """What is read of a line.

    Raises:
        InvalidError: it is none.
    """
    try:
        return _ROWS.validate_json(line)
    except ValidationError as error:
        raise InvalidError(_why(line, error)) from None


def _why(line: str, error: ValidationError) -> str:
    """The first thing that is wrong, in words that help."""
    try:
        fields = json.loads(line)
    except ValueError:
        return "is no JSON"
    except RecursionError:
        return "is nested too deeply"
    if isinstance(fields, dict) and "messages" in fields and "transcripts" not in fields:
        return (
            "messages have no tokens and no log-probs of the policy that sampled them; give "
            "`transcripts` with tokens, spans and logprobs"
        )
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {refusal(first)}"


def _check(found: _Transcript, *, vocabulary: int, max_context: int) -> None:
    """Refuse a transcript that a trainer cannot train.

    Raises:
        InvalidError: with the reason.
    """
    size = len(found.tokens)
    if size > max_context:
        raise InvalidError(f"{size} tokens; sampling.max_context is {max_context}")
    if min(found.tokens) < 0 or max(found.tokens) >= vocabulary:
        raise InvalidError(f"a token is not in 0 to {vocabulary - 1}, the vocabulary of the model")
    if found.branch_token:
        raise InvalidError("it continues a sibling, whose tokens are another episode's")
    ends = [0, *(span.end for span in found.spans)]
    starts = [*(span.start for span in found.spans), size]
    if ends != starts or any(a >= b for a, b in pairwise(ends)):
        raise InvalidError(f"spans: they do not cover the {size} tokens without gaps")
    policy = sum(s.end - s.start for s in found.spans if s.source is TokenSource.POLICY)
    if not policy:
        raise InvalidError("spans: none has the source `policy`, so nothing would be trained")
    if len(found.logprobs) != policy:
        raise InvalidError(
            f"logprobs: {len(found.logprobs)} of {policy} policy tokens; without those of the "
            "policy that sampled them no objective can weigh them"
        )
    if not all(math.isfinite(each) and each <= _NOT_ABOVE for each in found.logprobs):
        raise InvalidError("logprobs: one is not finite, or above 0")


def _transcript(found: _Transcript) -> Transcript:
    return Transcript(
        tokens=found.tokens,
        spans=tuple(TokenSpan(s.start, s.end, s.source) for s in found.spans),
        logprobs=found.logprobs,
        versions=(VersionRun(_UNKNOWN_VERSION, len(found.logprobs)),),
    )
