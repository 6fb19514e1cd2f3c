"""Enumerations that all services share, with the transitions of state machines."""

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
    """The outcome of scoring; only with `infra_error` the score is meaningless."""

    OK = "ok"
    PARSE_ERROR = "parse_error"
    TIMEOUT = "timeout"
    INFRA_ERROR = "infra_error"


class JobState(StrEnum):
    """The states of a job."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    PAUSING = "pausing"  # its trainer writes a checkpoint and ends
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
    JobState.QUEUED: frozenset(
        {JobState.STARTING, JobState.PAUSED, JobState.CANCELLING, JobState.FAILED}
    ),
    JobState.STARTING: frozenset(
        {JobState.RUNNING, JobState.PAUSING, JobState.CANCELLING, JobState.FAILED}
    ),
    JobState.RUNNING: frozenset(
        {JobState.PAUSING, JobState.CANCELLING, JobState.SUCCEEDED, JobState.FAILED}
    ),
    # It may be over before it is paused.
    JobState.PAUSING: frozenset(
        {JobState.PAUSED, JobState.CANCELLING, JobState.SUCCEEDED, JobState.FAILED}
    ),
    # It waits for capacity again, as others may have got what it had.
    JobState.PAUSED: frozenset({JobState.QUEUED, JobState.CANCELLING, JobState.FAILED}),
    JobState.CANCELLING: frozenset({JobState.CANCELLED, JobState.FAILED}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}


# In these states the controller may update the reason why a job does not progress.
EXPLAINED = frozenset({JobState.QUEUED, JobState.STARTING, JobState.RUNNING})
# Prefix of a reason that the trainer gave, which the controller must not clear.
TRAINER_SAYS = "trainer: "


class EpisodeState(StrEnum):
    """The states of an episode in the ledger."""

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
    # After a rewind, a step gets the same batch again.
    EpisodeState.TRAINED: frozenset({EpisodeState.DURABLE, EpisodeState.TAKEN, _DROP}),
    EpisodeState.DURABLE: frozenset(),
    # When the time of its eval is over before its group is complete.
    EpisodeState.MEASURED: frozenset({_DROP}),
    EpisodeState.DROPPED: frozenset(),
}


class EpisodeOutcome(StrEnum):
    """The ledger's decision on a submitted trajectory."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"  # this attempt has already been accepted
    SUPERSEDED = "superseded"  # another attempt has been accepted
    REQUEUED = "requeued"
    DROPPED = "dropped"


class GiveBackReason(StrEnum):
    """Why a worker returns an episode's lease."""

    DRAIN = "drain"  # the worker shuts down; does not count as an attempt
    INFRA_ERROR = "infra_error"  # another attempt may succeed
    VERSION_GONE = "version_gone"  # the pinned version is no longer served
    INVALID = "invalid"  # another attempt would fail the same way
    OVERSIZED = "oversized"  # likewise
    DENIED = "denied"  # an outside endpoint takes no request of the job, which fails


class DropReason(StrEnum):
    """Why an episode left the ledger untrained."""

    STALE = "stale"
    FILTERED = "filtered"
    SURPLUS = "surplus"
    REPAIRED = "repaired"  # a filter has asked for another episode in its place
    REPLACED = "replaced"  # a stored episode has taken its place
    GROUP_FAILED = "group_failed"
    INVALID = "invalid"
    OVERSIZED = "oversized"
    CANCELLED = "cancelled"
    EXHAUSTED = "exhausted_attempts"


class WorkerKind(StrEnum):
    """The kinds of service process."""

    GATEWAY = "gateway"
    CONTROLLER = "controller"
    EXPERIENCE = "experience"
    ENVIRONMENT = "environment"
    REWARD = "reward"
    ROLLOUT = "rollout"
    TRAINER = "trainer"
    TRACKING = "tracking"


class Phase(StrEnum):
    """What a worker is at, or what episodes in it wait for; the values are for people."""

    STARTING_ENGINE = "starting the engine"
    DOWNLOADING_MODEL = "downloading the model"
    LOADING_MODEL = "loading the model"
    LOADING_CHECKPOINT = "loading the checkpoint of step"
    WAITING_FOR_BATCH = "waiting for the batch of step"
    STEPPING = "training step"
    COMMITTING = "committing step"
    CHECKPOINTING = "checkpointing step"
    PUBLISHING = "publishing the weights of step"
    FINISHED = "waiting for the last evaluation"
    WAITING_FOR_WEIGHTS = "waiting for weights"
    RECEIVING_WEIGHTS = "receiving weights of version"
    LOADING_WEIGHTS = "loading weights of version"
    CHECKING_WEIGHTS = "checking weights of version"
    REFUSING_WEIGHTS = "refusing weights of version"
    SERVING = "serving version"
    # of episodes
    ROOM = "room"
    GENERATE = "generate"
    REPEAT = "repeat"
    STEP = "step"
    LOAD = "load"
    SCORE = "score"
    SUBMIT = "submit"


class TrackerState(StrEnum):
    """The states of a job's experiment tracker."""

    WAITING = "waiting"  # the tracking service has not picked up the job yet
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
    LENGTH = "length"  # reached `max_tokens` or the context length
    ABORT = "abort"  # the caller aborted it, or the engine shuts down
    ERROR = "error"


class StopReason(StrEnum):
    """Why a job gets no further batches."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    PAUSED = "paused"


class AuditOutcome(StrEnum):
    """The outcome of an audited action."""

    OK = "ok"
    REFUSED = "refused"  # not permitted, or an invalid request
    FAILED = "failed"


def check_job_transition(now: JobState, to: JobState) -> None:
    """Raise `TransitionError` unless a job may go from `now` to `to`."""
    if to not in JOB_TRANSITIONS[now]:
        raise TransitionError(f"job: {now} -> {to} is not allowed")


def check_episode_transition(now: EpisodeState, to: EpisodeState) -> None:
    """Raise `TransitionError` unless an episode may go from `now` to `to`."""
    if to not in EPISODE_TRANSITIONS[now]:
        raise TransitionError(f"episode: {now} -> {to} is not allowed")
