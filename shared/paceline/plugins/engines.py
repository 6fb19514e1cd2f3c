"""Inference engines: tokens in, tokens out, and the weights that they load."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline.enums import FinishReason
from paceline.types import SamplingParams, VersionRun


@dataclass(slots=True)
class EngineRequest:
    """One running request to an engine."""

    request_id: str
    tokens: tuple[int, ...]  # the whole context so far
    sampling: SamplingParams
    pinned_version: int = -1
    sampled: int = 0  # of the last tokens: those that this turn has sampled already, elsewhere


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """New tokens of one request; a `finish_reason` ends it."""

    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionRun, ...]
    finish_reason: FinishReason | None = None
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


class TensorSpec(Protocol):
    """A tensor of a snapshot."""

    @property
    def name(self) -> str:
        """As in the model's state."""
        ...

    @property
    def dtype(self) -> str:
        """Name of its element type: float32, bfloat16, ..."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""
        ...


class HeaderSpec(Protocol):
    """What an engine needs of a snapshot's header."""

    @property
    def version(self) -> int:
        """Policy version."""
        ...

    @property
    def tied(self) -> tuple[tuple[str, str], ...]:
        """(name, same_as) of tensors that are left out."""
        ...

    @property
    def canary_tokens(self) -> tuple[int, ...]:
        """A fixed prompt."""
        ...

    @property
    def canary_logprobs(self) -> tuple[float, ...]:
        """The trainer's log-probs of its tokens but the first."""
        ...


class WeightSnapshot(Protocol):
    """A whole, verified set of weights; checksums included."""

    @property
    def header(self) -> HeaderSpec:
        """What it is."""
        ...

    def tensors(self) -> Iterator[tuple[TensorSpec, memoryview]]:
        """Each tensor's entry and bytes."""
        ...


class Engine(Protocol):
    """An inference engine behind a rollout worker. All methods are called on one event loop."""

    async def start(self) -> None:
        """Load the model's shape with dummy weights; ready for `load`."""
        ...

    def submit(self, batch: Sequence[EngineRequest]) -> None:
        """Queue requests; their emissions come out of `emissions`. Bad ones end with `error`."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; each emits what it has with `finish_reason` abort. Unknown ids: no-op."""
        ...

    def emissions(self) -> AsyncIterator[list[EngineOutput]]:
        """Everything that comes out, in batches; one consumer."""
        ...

    async def load(self, snapshot: WeightSnapshot, activation: str) -> None:
        """Swap to other weights between decode steps.

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


class EngineFactory(Protocol):
    """What an entry point in `paceline.engines` names; all arguments are keywords.

    One that also takes `settings` (a mapping) gets what the rollout pool says of such engines.
    """

    def __call__(
        self,
        *,
        model_dir: Path | None,
        dtype: str,
        max_context: int,
        max_concurrent: int,
        threads: int,
        tokenizer_dir: Path | None,
        job_id: str,
        **options: Any,
    ) -> Engine:
        """An engine that is not started. `model_dir` has the small model files, no weights."""
        ...
