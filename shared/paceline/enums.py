"""Enumerations that all services share, and the transitions of those that are states."""

from __future__ import annotations

from enum import StrEnum

from paceline.errors import TransitionError


class TokenSource(StrEnum):
    """Who produced a token."""

    POLICY = "policy"
    ENVIRONMENT = "environment"
    TOOL = "tool"
    TEMPLATE = "template"
    EXPERT = "expert"


class Purpose(StrEnum):
    """What an episode is for."""

    TRAIN = "train"
    EVAL = "eval"


class ScoreStatus(StrEnum):
    """How scoring went; only `infra_error` says that the score means nothing."""

    OK = "ok"
    PARSE_ERROR = "parse_error"
    TIMEOUT = "timeout"
    INFRA_ERROR = "infra_error"


class JobState(StrEnum):
    """Life of a job."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """Nothing follows."""
        return not JOB_TRANSITIONS[self]


JOB_TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.STARTING, JobState.CANCELLING, JobState.FAILED}),
    JobState.STARTING: frozenset({JobState.RUNNING, JobState.CANCELLING, JobState.FAILED}),
    JobState.RUNNING: frozenset(
        {JobState.PAUSED, JobState.CANCELLING, JobState.SUCCEEDED, JobState.FAILED}
    ),
    JobState.PAUSED: frozenset({JobState.RUNNING, JobState.CANCELLING, JobState.FAILED}),
    JobState.CANCELLING: frozenset({JobState.CANCELLED, JobState.FAILED}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}


# In these states the reason why a job does not advance may change.
EXPLAINED = frozenset({JobState.QUEUED, JobState.STARTING, JobState.RUNNING})
# So begins a job's reason that its trainer has given, and that no controller takes away.
TRAINER_SAYS = "trainer: "


class EpisodeState(StrEnum):
    """Life of an episode in the ledger."""

    QUEUED = "queued"
    LEASED = "leased"
    FINISHED = "finished"
    READY = "ready"
    TAKEN = "taken"
    TRAINED = "trained"
    DURABLE = "durable"
    MEASURED = "measured"
    DROPPED = "dropped"


_DROP = EpisodeState.DROPPED
EPISODE_TRANSITIONS: dict[EpisodeState, frozenset[EpisodeState]] = {
    EpisodeState.QUEUED: frozenset({EpisodeState.LEASED, _DROP}),
    EpisodeState.LEASED: frozenset(
        {EpisodeState.QUEUED, EpisodeState.FINISHED, EpisodeState.MEASURED, _DROP}
    ),
    EpisodeState.FINISHED: frozenset({EpisodeState.READY, _DROP}),
    EpisodeState.READY: frozenset({EpisodeState.TAKEN, _DROP}),
    EpisodeState.TAKEN: frozenset({EpisodeState.TRAINED, _DROP}),
    # A rewound step hands its batch out again as it was fixed.
    EpisodeState.TRAINED: frozenset({EpisodeState.DURABLE, EpisodeState.TAKEN, _DROP}),
    EpisodeState.DURABLE: frozenset(),
    EpisodeState.MEASURED: frozenset(),
    EpisodeState.DROPPED: frozenset(),
}


class EpisodeOutcome(StrEnum):
    """What became of a trajectory that was submitted."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"  # this attempt was accepted before
    SUPERSEDED = "superseded"  # another attempt was
    REQUEUED = "requeued"
    DROPPED = "dropped"


class GiveBackReason(StrEnum):
    """Why a worker hands an episode back."""

    DRAIN = "drain"  # the worker goes away: no attempt is used up
    INFRA_ERROR = "infra_error"  # another attempt may fare better
    VERSION_GONE = "version_gone"  # that it is pinned to
    INVALID = "invalid"  # another attempt would end the same way
    OVERSIZED = "oversized"  # likewise


class DropReason(StrEnum):
    """Why an episode left the ledger untrained."""

    STALE = "stale"
    FILTERED = "filtered"
    SURPLUS = "surplus"
    GROUP_FAILED = "group_failed"
    INVALID = "invalid"
    OVERSIZED = "oversized"
    CANCELLED = "cancelled"
    EXHAUSTED = "exhausted_attempts"


class WorkerKind(StrEnum):
    """The kinds of process."""

    GATEWAY = "gateway"
    CONTROLLER = "controller"
    EXPERIENCE = "experience"
    ENVIRONMENT = "environment"
    REWARD = "reward"
    ROLLOUT = "rollout"
    TRAINER = "trainer"
    TRACKING = "tracking"


class TrackerState(StrEnum):
    """What an experiment tracker of a job is doing."""

    WAITING = "waiting"  # nobody follows the job yet
    FOLLOWING = "following"
    RETRYING = "retrying"
    DONE = "done"
    FAILED = "failed"

    @property
    def terminal(self) -> bool:
        """Nothing follows."""
        return self in {TrackerState.DONE, TrackerState.FAILED}


class FinishReason(StrEnum):
    """How a request to an engine ended."""

    STOP = "stop"  # a stop token or string, or the end of the text
    LENGTH = "length"  # as many tokens as asked for, or as fit
    ABORT = "abort"  # the caller gave it up, or the engine goes away
    ERROR = "error"


class StopReason(StrEnum):
    """Why a job gets no further batch."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    PAUSED = "paused"


class AuditOutcome(StrEnum):
    """What came of an attempt to do something."""

    OK = "ok"
    REFUSED = "refused"  # the caller must not do it, or asked for something impossible
    FAILED = "failed"


def check_job_transition(now: JobState, to: JobState) -> None:
    """Raise `TransitionError` unless a job may go from `now` to `to`."""
    if to not in JOB_TRANSITIONS[now]:
        raise TransitionError(f"job: {now} -> {to} is not allowed")


def check_episode_transition(now: EpisodeState, to: EpisodeState) -> None:
    """Raise `TransitionError` unless an episode may go from `now` to `to`."""
    if to not in EPISODE_TRANSITIONS[now]:
        raise TransitionError(f"episode: {now} -> {to} is not allowed")
