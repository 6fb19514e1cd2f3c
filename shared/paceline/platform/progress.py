"""The progress of a job: a snapshot of its ledger's counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.enums import StopReason


@dataclass(frozen=True, slots=True)
class EvalProgress:
    """An eval run in progress; numbers of tasks."""

    version: int
    step: int
    total: int
    measured: int
    open: int
    name: str = ""
    """Of the evaluation; empty: that of `eval`."""


@dataclass(frozen=True, slots=True)
class EvalOutcome:
    """The result of a finished eval run."""

    version: int
    step: int
    reward: float | None  # None: nothing was measured
    measured: int
    of: int
    complete: bool
    scores: dict[str, float] = field(default_factory=dict[str, float])
    """pass@k and maj@k, by name."""


@dataclass(frozen=True, slots=True)
class EvalStanding:
    """What one of a job's evaluations has come to."""

    name: str
    last: EvalOutcome
    reward: float | None = None
    """Mean reward of the last complete run, at `step`."""
    step: int | None = None
    reward_start: float | None = None
    """Mean reward of the first complete run."""


@dataclass(frozen=True, slots=True)
class LedgerProgress:
    """Counts, waits and evals of one job."""

    counts: dict[str, int] = field(default_factory=dict[str, int])
    """Training episodes by state, and `admitted`."""
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    """Dropped training episodes by reason."""
    filtered: dict[str, int] = field(default_factory=dict[str, int])
    """Groups that filters have dropped, by the reason that they gave."""
    tokens_generated: int = 0
    """Policy tokens sampled for training, not including `eval_tokens`."""
    eval_tokens: int = 0
    trained_tokens: int = 0
    staleness_histogram: dict[str, int] = field(default_factory=dict[str, int])
    """Trained episodes by age, in versions."""
    trainer_wait_total_s: float = 0.0
    step: int = 0
    version: int = -1
    stop: StopReason | None = None
    """Why there will be no further batch; null: there will be."""
    open_groups: int = 0
    accepted_groups: int = 0
    ready_groups: int = 0
    headroom_groups: int = 0
    """Groups that could be admitted now."""
    group_size: int = 0
    """Mean size of the last groups; that of the job if they are all alike."""
    failed_attempts: int = 0
    """Attempts of episodes that failed since the ledger was opened."""
    last_failure: str = ""
    """What the newest of them failed on."""
    back_off_s: float = 0.0
    """Seconds until the next attempts may begin, since all of the last ones failed."""
    disagreement: str = ""
    """Rollout workers whose log-probs are not those of the trainer."""
    unanswered: str = ""
    """What the job's own code has not answered to the ledger for a second or more."""
    payload_bytes: int = 0
    waiting: bool = False
    """Whether the trainer waits for a batch."""
    waiting_s: float = 0.0
    reward_mean: float | None = None
    """Mean reward of the newest batch."""
    eval: EvalProgress | None = None
    eval_last: EvalOutcome | None = None
    eval_reward: float | None = None
    """Mean reward of the last complete eval, at `eval_step`."""
    eval_step: int | None = None
    eval_reward_start: float | None = None
    """Mean reward of the first complete eval."""
    evals: tuple[EvalStanding, ...] = ()
    """Of the evaluations in `evals`; the fields `eval_*` are those of the main one."""
