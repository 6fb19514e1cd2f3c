"""The domain types that all services share; their enumerations are in `paceline.enums`."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.enums import JobState, Purpose, ScoreStatus, TokenSource, TrackerState, WorkerKind


@dataclass(frozen=True, slots=True)
class Task:
    """One problem instance; `task_id` is the digest of environment, payload and seed."""

    task_id: str
    environment: str
    payload: str  # JSON
    seed: int = 0
    domain: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled. `seed` makes a request reproducible on any worker."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens `[start, end)` of a transcript and who produced them."""

    start: int
    end: int
    source: TokenSource


@dataclass(frozen=True, slots=True)
class VersionRun:
    """`count` consecutive policy tokens that one policy version sampled, on one worker."""

    version: int
    count: int
    worker: str = ""
    """Of the rollout workers; empty: unknown, as to the engine itself."""


@dataclass(frozen=True, slots=True)
class StepMark:
    """One turn of a multi-turn episode: tokens `[start, end)` and the environment's reward."""

    start: int
    end: int
    reward: float = 0.0
    matched_expert: bool = False
    patched: bool = False
    first_error: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """A turn that an outside endpoint has taken; of its tokens at most their number is known."""

    text: str  # as the environment is given it
    model: str = ""  # that the endpoint says has answered
    finish_reason: str = ""
    prompt_tokens: int = -1  # as the endpoint counts them; -1: it has not said
    completion_tokens: int = -1
    reward: float = 0.0  # of the environment


@dataclass(frozen=True, slots=True)
class Transcript:
    """Tokens as they were emitted; text is never tokenised again.

    `spans` cover `tokens` without gaps. `logprobs` and `versions` describe the policy tokens
    only, in order: `len(logprobs) == sum(v.count for v in versions)`. One of an outside endpoint
    has `messages` and `replies` instead, and none of these.
    """

    tokens: tuple[int, ...]
    spans: tuple[TokenSpan, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionRun, ...]
    steps: tuple[StepMark, ...] = ()
    parent: int = -1  # index of the transcript it branched from
    branch_token: int = 0
    original_prompt: bool = False
    """Its prompt is the task's own, not the one that the policy was shown when it sampled."""
    messages: str = ""
    """JSON: all messages in the form of OpenAI's API, those of the policy included."""
    replies: tuple[Reply, ...] = ()
    """The turns of the policy among them."""

    @property
    def num_policy_tokens(self) -> int:
        """Tokens that the policy sampled, as far as they are known."""
        return len(self.logprobs)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before the first one that the policy sampled; all of them without one."""
        sampled = (span.start for span in self.spans if span.source is TokenSource.POLICY)
        return next(sampled, len(self.tokens))

    @property
    def oldest_version(self) -> int:
        """The oldest policy version in it; -1 without policy tokens."""
        return min((v.version for v in self.versions), default=-1)


@dataclass(frozen=True, slots=True)
class Score:
    """The reward service's result for one episode."""

    reward: float
    parts: dict[str, float]
    status: ScoreStatus = ScoreStatus.OK
    raw_answer: str = ""
    normalised_answer: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds an episode spent by stage."""

    generate_s: float = 0.0
    environment_s: float = 0.0
    reward_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a trajectory came from."""

    environment_worker: str = ""
    rollout_workers: tuple[str, ...] = ()
    engine: str = ""
    precision: str = ""
    prompt_variant: str = ""
    variant_meta: str = ""  # JSON
    trace: str = ""  # W3C traceparent of the attempt; empty if its trace is not sampled


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A complete attempt at a task: transcripts, reward, timing and provenance."""

    group_id: str
    index: int  # position within the group
    attempt: int
    task_id: str
    purpose: Purpose
    transcripts: tuple[Transcript, ...]
    score: Score
    sampling: SamplingParams
    truncated: bool = False
    topology: str = "linear"
    agent_id: str = ""
    environment_reward: float = 0.0
    response_text: str = ""
    timing: Timing = field(default_factory=Timing)
    provenance: Provenance = field(default_factory=Provenance)
    prompt_text: str = ""
    """Text of the first transcript before its first policy token, with special tokens."""
    completion_text: str = ""
    """Text of the first transcript after its prompt; empty if it is `response_text`."""

    @property
    def episode_id(self) -> str:
        """Id of the episode in the ledger."""
        return episode_id(self.group_id, self.index)

    @property
    def num_policy_tokens(self) -> int:
        """Policy tokens over all transcripts."""
        return sum(t.num_policy_tokens for t in self.transcripts)

    @property
    def num_tokens(self) -> int:
        """All tokens over all transcripts."""
        return sum(len(t.tokens) for t in self.transcripts)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version among its tokens; -1 without policy tokens."""
        found = [t.oldest_version for t in self.transcripts if t.num_policy_tokens]
        return min(found, default=-1)


def episode_id(group_id: str, index: int) -> str:
    """Id of the `index`-th episode of a group."""
    return f"{group_id}/{index}"


@dataclass(frozen=True, slots=True)
class EpisodeProgress:
    """The progress of a leased episode, kept if its worker dies."""

    group_id: str
    index: int
    attempt: int
    transcripts: tuple[Transcript, ...]
    actions: tuple[str, ...] = ()  # replayable environments are rebuilt from seed and actions
    sampled: bool = False  # it needs no further tokens, and waits for its score


@dataclass(frozen=True, slots=True)
class EpisodeStart:
    """What an allocator has decided on one episode; zeros mean the job's own limits."""

    variant: str = ""
    meta: str = ""  # JSON
    parent: int = -1  # sibling whose first `parent_tokens` tokens it continues; -1: none
    parent_tokens: int = 0
    max_turns: int = 0
    max_tokens: int = 0  # of the policy, over all turns
    temperature: float = 0.0
    tasks: tuple[int, ...] = ()  # places in the `tasks` of the assignment


@dataclass(frozen=True, slots=True)
class Assignment:
    """The unit of lease: episodes `indices` of one group, all for the same task."""

    job_id: str
    group_id: str
    indices: tuple[int, ...]
    attempts: tuple[int, ...]
    task: Task
    purpose: Purpose
    lease_s: float
    seed: int
    pinned_version: int = -1  # eval: the version that must sample
    min_version: int = -1  # samples of older versions are too stale to train on
    progress: tuple[EpisodeProgress, ...] = ()
    traces: tuple[str, ...] = ()  # W3C traceparent of each lease; empty: none is sampled
    starts: tuple[EpisodeStart, ...] = ()  # of each episode; empty: nothing special
    eval_set: str = ""  # which of the job's evaluations; empty: that of `eval`
    tasks: tuple[Task, ...] = ()  # other tasks that starts name


@dataclass(frozen=True, slots=True)
class WorkerPhase:
    """What a worker is at, and how far it is; in shared ones also what episodes wait for."""

    name: str  # one of `Phase`; others are of another release
    number: int = -1  # of the version or step that it is for; -1: none
    done: float = 0.0  # grows while the phase lasts; bytes, micro-batches or episodes
    total: float = 0.0  # 0: unknown
    job_id: str = ""  # in shared workers; empty: the worker's own
    longest_s: float = 0.0  # that such a phase has lasted lately in this process; 0: unknown
    detail: str = ""  # what another side said last, such as an endpoint that refuses requests
    rank: str = ""  # of a trainer of several, the one that is behind: `rank 3 of 4`; empty: all


@dataclass(frozen=True, slots=True)
class Worker:
    """A live process in the roster."""

    worker_id: str
    kind: WorkerKind
    endpoint: str  # host:port of its gRPC server; empty if it serves none
    site: str = "local"
    job_id: str = ""  # empty: a shared pool
    active_version: int = -1
    weights_endpoint: str = ""  # http://host:port of its chunk server
    load: dict[str, float] = field(default_factory=dict[str, float])
    pid: int = 0
    pool: str = ""  # pool of a rollout worker; empty: the job's first one
    phases: tuple[WorkerPhase, ...] = ()


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """One publication of a job's weights."""

    version: int
    step: int
    parent: int = -1
    incarnation: int = 0
    digest: str = ""
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WeightRefusal:
    """A version that a rollout worker refuses for good: its engine computes something else."""

    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerMismatch:
    """How far the log-probs of a rollout worker are from the trainer's, under the same weights."""

    worker_id: str
    version: int
    kl: float
    """Nats per token."""
    allowed: float
    since_version: int | None = None
    """The first of the versions running in which it is above what is allowed."""
    at_fault: bool = False
    """Above it in several versions running, while other workers agree: its engine is wrong."""


@dataclass(frozen=True, slots=True)
class TrackerStatus:
    """The progress of one experiment tracker of a job."""

    name: str
    kind: str
    state: TrackerState
    rows: int = 0  # rows of the job's history that it holds
    url: str = ""  # link to the run; empty: unknown
    detail: str = ""  # what is wrong


@dataclass(frozen=True, slots=True)
class CheckpointStatus:
    """A checkpoint of a job."""

    step: int
    digest: str  # SHA-256 in hex of its `paceline.json`; empty: written by an earlier release
    value: float | None = None  # of the metric in `trainer.checkpoint.best`; None: not evaluated
    best: bool = False


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The state and progress of a job, according to its ledger."""

    job_id: str
    name: str
    tenant: str
    state: JobState
    reason: str = ""
    step: int = 0
    version: int = -1
    incarnation: int = 0
    eval_reward: float | None = None
    eval_step: int | None = None
    summary: dict[str, object] = field(default_factory=dict[str, object])
    tracking: tuple[TrackerStatus, ...] = ()
    checkpoints: tuple[CheckpointStatus, ...] = ()  # by step
    age_s: float = 0.0  # seconds since it was submitted
    runtime_s: float = 0.0  # from its start until now or its end
    # RFC 3339 in UTC, by the store's clock. For display only: no decision depends on them.
    created_at: str = ""
    started_at: str | None = None
    finished_at: str | None = None
    # `module:attribute` of functions that it may name although the operator has not listed them.
    unlisted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """A job: its immutable spec (JSON of `JobSpec`) and its status."""

    status: JobStatus
    spec: str
    artifacts: dict[str, str] = field(default_factory=dict[str, str])  # file name -> sha256
