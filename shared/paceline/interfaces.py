"""What each kind of plug-in looks like. Plain callables or small classes; no base class needed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from paceline.types import Sampling, Score, Task, Transcript, VersionRun


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a dialogue."""

    role: str  # system | user | assistant | tool
    content: str


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment shows the policy: new messages, or plain text without a chat template."""

    messages: tuple[Message, ...] = ()
    text: str = ""
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class StepResult:
    """The environment's answer to an action."""

    observation: Observation
    reward: float
    done: bool
    truncated: bool = False


class Environment(Protocol):
    """One episode's world, made with the job's `tasks.options` (eval's overlaid) as keywords.

    `replayable`: the same seed and actions rebuild the same state.
    """

    replayable: bool

    async def reset(self, task: Task, seed: int) -> Observation:
        """Start; the first observation."""
        ...

    async def step(self, action: str) -> StepResult:
        """Apply the policy's decoded turn."""
        ...

    async def close(self) -> None:
        """Let go of everything."""
        ...


class TaskSource(Protocol):
    """A collection of tasks, addressed by position so that order is f(seed, epoch)."""

    def __len__(self) -> int:
        """How many tasks one epoch has."""
        ...

    def __getitem__(self, position: int, /) -> Task:
        """The task at a position of the unshuffled collection."""
        ...


class Sampler(Protocol):
    """Order of tasks. State travels with the trainer's step."""

    def next(self) -> int | None:
        """Position of the next task; None when all epochs are over."""
        ...

    def state(self) -> dict[str, Any]:
        """JSON-able; `load` brings it back."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        ...


@dataclass(frozen=True, slots=True)
class RewardInput:
    """What a reward part may look at."""

    episode_id: str
    task: Task
    response: str
    environment_reward: float = 0.0
    truncated: bool = False


class Reward(Protocol):
    """Score of one episode by one part; may raise, hang or crash without harm to others."""

    def __call__(self, item: RewardInput, **options: Any) -> Score | float | Awaitable[Score]:
        """Points, or a whole `Score`."""
        ...


class GroupFilter(Protocol):
    """Whether a finished group is worth training on."""

    def __call__(self, rewards: Sequence[float], **options: Any) -> str:
        """Empty to keep the group, else the reason to drop it."""
        ...


@dataclass(slots=True)
class Generation:
    """One running request to an engine."""

    request_id: str
    tokens: tuple[int, ...]  # the whole context so far
    sampling: Sampling
    pinned_version: int = -1
    sampled: int = 0  # of the last tokens: those that this turn has sampled already, elsewhere


@dataclass(frozen=True, slots=True)
class Emission:
    """New tokens of one request; `finish_reason` ends it: stop, length, abort or error."""

    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionRun, ...]
    finish_reason: str = ""
    matched_stop: str = ""
    error_code: str = ""
    error: str = ""
    # With the end, of engines that know: seconds until the prompt was begun, then until decoding.
    queue_s: float = -1.0
    prefill_s: float = -1.0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Counters since start; seconds are monotonic sums."""

    engine: str
    precision: str
    version: int
    running: int
    waiting: int
    tokens_generated: int
    prompt_tokens: int
    max_context: int
    vocab_size: int
    busy_s: float
    idle_s: float
    swap_s: float
    cached_tokens: int = 0  # of prompts, found in the prefix cache
    kv_ratio: float = -1.0  # share of the KV cache in use; below 0: unknown


class Engine(Protocol):
    """An inference engine behind a rollout worker. All methods are called on one event loop."""

    async def start(self) -> None:
        """Load the model's shape with dummy weights; ready for `load`."""
        ...

    def submit(self, batch: Sequence[Generation]) -> None:
        """Queue requests; their emissions come out of `emissions`. Bad ones end with `error`."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; each emits what it has with `finish_reason` abort. Unknown ids: no-op."""
        ...

    def emissions(self) -> AsyncIterator[list[Emission]]:
        """Everything that comes out, in batches; one consumer."""
        ...

    async def load(self, snapshot: Any, activation: str) -> None:
        """Swap to a whole, verified `paceline.weights.Snapshot` between decode steps.

        `in_flight` keeps the KV cache, `interrupt` recomputes it, `at_boundary` lets running
        requests finish first. Pinned requests always finish first.
        """
        ...

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of tokens[1:] at temperature 1 (the canary)."""
        ...

    def status(self) -> EngineStatus:
        """Counters now."""
        ...

    async def close(self) -> None:
        """Abort everything and stop."""
        ...


class Advantage(Protocol):
    """Advantages of a whole batch, one per episode or one per policy token."""

    def __call__(self, rewards: Any, groups: Any, lengths: Any, **options: Any) -> Any:
        """`rewards` float64 [N], `groups` int64 [N], `lengths` int64 [N] -> float64 [N]."""
        ...


class Topology(Protocol):
    """Drives the episodes of an assignment."""

    async def __call__(self, episode: Any, **options: Any) -> tuple[Transcript, ...]:
        """Run to the end; the transcripts."""
        ...


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is told of its job. `run_id` and `folder` are the same after a restart."""

    run_id: str
    name: str
    tenant: str
    axis: str  # step | version: what curves are drawn over
    folder: Path  # for files of this tracker of this job; exists
    shared_folder: Path  # for files that all jobs share; made by who uses it
    config: Mapping[str, Any]  # the job file as JSON


@dataclass(frozen=True, slots=True)
class TrackedSample:
    """One trajectory for the table."""

    prompt: str
    response: str
    reward: float
    parts: Mapping[str, float]
    version: int  # oldest that sampled it
    staleness: int  # in trainer steps; -1: not known
    truncated: bool
    episode: str


@dataclass(frozen=True, slots=True)
class TrackedPoint:
    """Values of one moment.

    `train` and `eval` points are the rows of the job's history: `index` counts from 0 without gaps.
    `system` points have no index: what the workers do, each told at most once.
    """

    kind: str  # train | eval | system
    index: int  # -1: system
    step: int
    version: int  # of the weights; -1: none yet
    values: Mapping[str, float]
    samples: tuple[TrackedSample, ...] = ()


class Tracker(Protocol):
    """One run in an experiment tracker. Lives in a process of its own: may block, raise or hang.

    Made by `factory(run, **options)`, which opens the run of an earlier life if there is one. It is
    ended by SIGKILL when it takes longer than `timeout_s` over a call, and made again.
    """

    @property
    def url(self) -> str:
        """Where to look; empty if that is not known."""
        ...

    @property
    def rows(self) -> int | None:
        """How many rows of the history the run holds from earlier lives; None: cannot tell.

        The next row that comes has this index. One that cannot tell gets those again that were
        not acknowledged before it died.
        """
        ...

    def write(self, points: Sequence[TrackedPoint]) -> None:
        """Add points; they are safe when this returns."""
        ...

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        """The job is over: succeeded, failed or cancelled."""
        ...

    def close(self) -> None:
        """This process ends, the run does not."""
        ...
