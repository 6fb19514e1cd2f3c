"""The typed records that the ledger stores besides groups, read and written only here.

The scripts pass most of them on as text. What a script decodes and writes again goes through Lua's
JSON, which has only doubles and writes 14 digits of them: there a number with a fraction is
`Exact`, and integers are below 10^14.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import PlainSerializer, TypeAdapter

from paceline.enums import ScoreStatus
from paceline.platform.progress import EvalStanding
from paceline.platform.text import encodable
from paceline.plugins import GroupOutcome
from paceline.types import PolicyVersion
from paceline_experience.ledger.failures import Failures

T = TypeVar("T")
Exact = Annotated[float, PlainSerializer(repr, return_type=str)]  # as text, which Lua cannot round
DRAINING, HELD = "draining", "held"  # `LedgerMeta.paused` of a job that pauses


@dataclass(frozen=True, slots=True)
class Publication:
    """One version of the weights; its tokens count their age from `age_step`."""

    version: int
    step: int
    age_step: int
    parent: int
    incarnation: int
    num_bytes: int
    digest: str = ""  # empty: not known yet

    def policy_version(self) -> PolicyVersion:
        """As it goes over the wire."""
        return PolicyVersion(
            version=self.version,
            step=self.step,
            parent=self.parent,
            incarnation=self.incarnation,
            digest=self.digest,
            num_bytes=self.num_bytes,
        )


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """What the ledger keeps of a finished episode besides its payload."""

    attempt: int
    reward: float
    truncated: bool
    policy_tokens: int
    tokens: int
    oldest_version: int  # among its policy tokens; -1: it has none
    num_bytes: int  # size of its payload
    answer: str = ""  # normalised and clipped
    parts: dict[str, float] = field(default_factory=dict[str, float])  # if it has several
    turns: tuple[tuple[int, float, int], ...] = ()
    """End, reward and flags (1: matched expert, 2: patched, 4: first error) of the first turns, if
    the job has an allocator."""
    inherited: int = 0  # policy tokens that it has from a sibling, and that are trained there
    status: ScoreStatus = ScoreStatus.OK  # of its score
    said: str = ""  # digest of its text, of an evaluated one whose reward names no answer
    model: str = ""  # that an outside endpoint says has answered

    @property
    def own_tokens(self) -> int:
        """Policy tokens that were sampled for this episode."""
        return self.policy_tokens - self.inherited


@dataclass(frozen=True, slots=True)
class OutcomeRecord:
    """A decided group, as plug-ins with a memory are told of it (`GroupOutcome`)."""

    seq: int  # order of admission
    task: int  # position in the task source
    rewards: tuple[float, ...] = ()
    answers: tuple[str, ...] = ()
    filtered: bool = False
    lengths: tuple[int, ...] = ()
    truncated: tuple[bool, ...] = ()
    parts: dict[str, tuple[float | None, ...]] = field(
        default_factory=dict[str, tuple[float | None, ...]]
    )
    left_out: tuple[int, ...] = ()
    failed: str = ""
    pick: str = ""
    replayed: tuple[float, ...] = ()

    def outcome(self) -> GroupOutcome:
        """As plug-ins see it."""
        picked: dict[str, Any] = json.loads(self.pick) if self.pick else {}
        nan = float("nan")
        return GroupOutcome(
            task=self.task,
            rewards=self.rewards,
            answers=self.answers,
            filtered=self.filtered,
            lengths=self.lengths,
            truncated=self.truncated,
            parts={
                name: tuple(nan if value is None else value for value in values)
                for name, values in self.parts.items()
            },
            kept=tuple(
                not self.filtered and index not in self.left_out
                for index in range(len(self.rewards))
            ),
            failed=self.failed,
            variant=picked.get("variant", ""),
            meta=picked.get("meta", {}),
            replayed=self.replayed,
        )


@dataclass(frozen=True, slots=True)
class BatchStats:
    """Reward, staleness and length statistics of a whole batch."""

    reward_mean: Exact = 0.0
    reward_std: Exact = 0.0
    group_reward_std: Exact = 0.0
    zero_variance_share: Exact = 0.0
    batch_versions: int = 0
    staleness_mean: Exact = 0.0
    staleness_max: int = 0
    staleness: dict[int, int] = field(default_factory=dict[int, int])  # age in steps -> episodes
    batch_episodes: int = 0
    batch_groups: int = 0
    batch_tokens: int = 0
    response_tokens_mean: Exact = 0.0
    response_tokens_max: int = 0
    truncated_share: Exact = 0.0
    trainer_wait_s: Exact = 0.0
    # As in `LengthBias`.
    dropped_share: Exact = 0.0
    dropped_tokens_mean: Exact = 0.0
    aborted_share: Exact = 0.0
    aborted_tokens_mean: Exact = 0.0
    resumed_share: Exact = 0.0
    resumed_tokens_mean: Exact = 0.0
    replayed: int = 0  # guests
    replayed_age_mean: Exact = 0.0  # of those, in steps
    parse_error_share: Exact = 0.0  # by the status of scores
    timeout_share: Exact = 0.0


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """The fixed batch of a step."""

    batch_id: str
    step: int
    groups: tuple[str, ...]
    stats: BatchStats
    committed: bool = False
    counted: bool = False  # in the totals, once, however often the step is trained
    notes: dict[str, Exact] = field(default_factory=dict[str, Exact])  # of the advantages
    # Versions -> steps from which their tokens count their age. A rewind changes those of the
    # ledger, but not of a batch that is trained again.
    age_steps: dict[int, int] = field(default_factory=dict[int, int])


@dataclass(frozen=True, slots=True)
class EvalTotals:
    """Sums over the measured tasks of an eval, and over all samples of them."""

    measured: int = 0  # tasks
    reward: float = 0.0  # of tasks, each the mean of its samples
    tokens: int = 0
    truncated: int = 0
    parse_errors: int = 0  # by the status of scores
    timeouts: int = 0
    texts: int = 0  # samples that have a text, but no answer
    scores: dict[str, float] = field(default_factory=dict[str, float])  # of tasks, by name
    # Of the deviations of tasks from their mean, by name of the score and for `reward`.
    squares: dict[str, float] = field(default_factory=dict[str, float])
    models: dict[str, int] = field(default_factory=dict[str, int])
    """Samples by the model that an outside endpoint says has answered."""


@dataclass(frozen=True, slots=True)
class EvalRun:
    """An open eval; times in seconds of the job's clock."""

    version: int
    step: int
    total: int  # tasks
    since: float
    deadline: float
    admitted: int = 0
    leased: bool = False  # the timeout starts with the first lease
    totals: EvalTotals = field(default_factory=EvalTotals)
    name: str = ""  # of the evaluation
    then: tuple[str, ...] = ()  # evaluations that measure the same version next


@dataclass(frozen=True, slots=True)
class Exported:
    """Progress of exports: the offset of the last trajectory that is in a file."""

    offset: int = -1
    num_missing: int = 0  # in no file: deleted or unreadable when they were to be exported
    begun: str = ""  # name of a file that may or may not have been written
    until: int = -1
    count: int = 0  # trajectories in that range when the export began
    newest: str = ""  # name of the last file that was written


@dataclass(frozen=True, slots=True)
class WatchRecord:
    """How far conditions on metrics have followed the history."""

    offset: int = 0  # rows seen
    steps: dict[str, int] = field(default_factory=dict[str, int])  # the last one, by source
    streaks: dict[int, int] = field(default_factory=dict[int, int])  # rows in a row, by condition


@dataclass(frozen=True, slots=True)
class LedgerMeta:
    """The fields of a job's `meta` hash; an empty one means the default."""

    step: int = 0  # optimiser steps done
    version: int = -1  # the newest publication
    incarnation: int = 0  # the newest incarnation of the trainer
    failures: Failures = field(default_factory=Failures)
    feed: str = ""  # state of the task cursor
    clock: float = 0.0  # the job's clock in seconds, saved every few seconds
    started: float | None = None  # when the first version was published
    # verdicts of rollout workers
    accepted: int = -1  # the newest version that one of them has served
    withdrawn: tuple[int, ...] = ()  # later ones that all of them refuse
    # checkpoints
    checkpoint: str = ""
    checkpoint_step: int = 0
    checkpoints: dict[int, str] = field(default_factory=dict[int, str])  # step -> its digest
    # step -> value of the metric that decides which checkpoint is the best
    evaluated: dict[int, float] = field(default_factory=dict[int, float])
    durable: int = 0  # steps below this are never trained again
    exported: Exported = field(default_factory=Exported)
    # the end
    stop: str = ""  # why there will be no further batch
    stop_reason: str = ""
    stop_at: float = 0.0
    told: bool = False  # the trainer was informed of the stop
    paused: str = ""  # how far a pause has come, as in `pauses.py`
    closed: bool = False
    done: bool = False
    problem: str = ""
    invalid_detail: str = ""  # what was wrong with the last task that could not be run
    watch: WatchRecord = field(default_factory=WatchRecord)
    # evals
    eval: EvalRun | None = None
    eval_due: tuple[str, ...] = ()  # by name
    eval_sets: dict[str, EvalStanding] = field(default_factory=dict[str, EvalStanding])

    def changed(self, texts: Mapping[str, str]) -> LedgerMeta:
        """A copy with these fields of the hash applied."""
        if not texts:
            return self
        values = {name: getattr(self, name) for name in _DEFAULTS}
        for name, text in texts.items():
            values[name] = _value(name, text)
        return LedgerMeta(**values)


def field_texts(**values: object) -> dict[str, str]:
    """Fields of `LedgerMeta` as the hash stores them.

    Raises:
        KeyError: there is no such field.
    """
    return {name: _text(name, value) for name, value in values.items()}


def record_text(record: object) -> str:
    """A record as JSON."""
    return _adapter(type(record)).dump_json(record).decode()


def summary_text(summary: EpisodeSummary) -> str:
    """The same for a summary, of which there are many: defaults are left out."""
    return _adapter(EpisodeSummary).dump_json(summary, exclude_defaults=True).decode()


def row_text(*, step: int, kind: str, values: Mapping[str, Any]) -> str:
    """A row of the history as the scripts store it; every text in it can be served."""
    return encodable(json.dumps({"step": step, "kind": kind, "values": values}, ensure_ascii=False))


def parse_record(kind: type[T], text: str | bytes) -> T:
    """Parse a record; raises `ValueError`."""
    return _adapter(kind).validate_json(text)


def make_record(kind: type[T], values: Mapping[str, Any]) -> T:
    """A record from a script's answer; raises `ValueError`."""
    return _adapter(kind).validate_python(values)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _text(name: str, value: object) -> str:
    if value == _DEFAULTS[name]:
        return ""
    return value if isinstance(value, str) else _adapter(_HINTS[name]).dump_json(value).decode()


def _value(name: str, text: str) -> object:
    if not text:
        return _DEFAULTS[name]
    hint = _HINTS[name]
    return text if hint is str else _adapter(hint).validate_json(text)


_DEFAULTS = {each.name: getattr(LedgerMeta(), each.name) for each in fields(LedgerMeta)}
_HINTS = get_type_hints(LedgerMeta)
