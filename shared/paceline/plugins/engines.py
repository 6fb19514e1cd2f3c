"""The protocol of inference engines, their requests and outputs, and the weights they load."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from paceline.enums import FinishReason
from paceline.types import SamplingParams, VersionRun

NameKind = Literal["memory", "checkpoint"]
"""Of tensors: as transformers has them in memory, or as `save_pretrained` writes them."""


@dataclass(slots=True)
class EngineRequest:
    """One running request to an engine."""

    request_id: str
    tokens: tuple[int, ...]  # the full context so far
    sampling: SamplingParams
    pinned_version: int = -1
    sampled: int = 0  # number of last tokens that this turn has already sampled on another engine


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
    # Set with the finish reason if known: seconds queued, then seconds of prefill.
    queue_s: float = -1.0
    prefill_s: float = -1.0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Counters since start; seconds are cumulative."""

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
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    kv_ratio: float = -1.0  # share of the KV cache in use; below 0: unknown


class TensorSpec(Protocol):
    """A tensor of a snapshot."""

    @property
    def name(self) -> str:
        """The name, of the kind that the header tells."""
        ...

    @property
    def dtype(self) -> str:
        """Element type: float32, bfloat16, ..."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions of the tensor."""
        ...


class HeaderSpec(Protocol):
    """The part of a snapshot's header that engines use."""

    @property
    def version(self) -> int:
        """Policy version."""
        ...

    @property
    def names(self) -> NameKind:
        """The kind of names and shapes; a trainer of the previous release sends `memory`."""
        ...

    @property
    def tied(self) -> tuple[tuple[str, str], ...]:
        """(name, same_as) of tied tensors, which the snapshot omits."""
        ...

    @property
    def canary_tokens(self) -> tuple[int, ...]:
        """Deprecated: empty. The worker itself compares what `score` returns."""
        ...

    @property
    def canary_logprobs(self) -> tuple[float, ...]:
        """Deprecated: empty."""
        ...


class WeightSnapshot(Protocol):
    """A complete set of weights with verified checksums."""

    @property
    def header(self) -> HeaderSpec:
        """The header of the snapshot."""
        ...

    def tensors(self) -> Iterator[tuple[TensorSpec, memoryview]]:
        """Iterate over the tensors: entry and bytes of each."""
        ...


class Engine(Protocol):
    """The inference engine of a rollout worker. All methods are called on one event loop."""

    async def start(self) -> None:
        """Create the model with dummy weights, ready for `load`."""
        ...

    def submit(self, batch: Sequence[EngineRequest]) -> None:
        """Queue requests; outputs arrive through `emissions`. Invalid ones end with `error`."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests; each emits its tokens so far with reason `abort`. Ignores unknown ids."""
        ...

    def emissions(self) -> AsyncIterator[list[EngineOutput]]:
        """All outputs, in batches; for a single consumer."""
        ...

    async def load(self, snapshot: WeightSnapshot, activation: str) -> None:
        """Swap to new weights between decode steps.

        `in_flight` keeps the KV cache, `interrupt` recomputes it, `at_boundary` lets running
        requests finish first. Pinned requests always finish first.
        """
        ...

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of tokens[1:] at temperature 1 (the canary)."""
        ...

    def status(self) -> EngineStatus:
        """The current counters."""
        ...

    async def close(self) -> None:
        """Abort everything and stop."""
        ...


@runtime_checkable
class ProvesWeights(Protocol):
    """Optional, for an engine that can compare the weights it computes with to a snapshot's.

    Log-probs do not show that a tensor is that of an earlier version, or that a small one is left
    out. Workers ask at the first two loads, at every sixteenth version, and before they give up on
    a version.
    """

    async def unequal(self, snapshot: WeightSnapshot) -> list[str]:
        """The names of tensors whose bytes in the engine are not those of the snapshot."""
        ...


@runtime_checkable
class RollsBack(Protocol):
    """Optional, for an engine that can go back to weights older than those it has.

    A worker whose engine gets a version wrong then goes on with the one before, instead of
    waiting without weights for the next.
    """

    async def roll_back(self, snapshot: WeightSnapshot) -> None:
        """Swap to older weights as `load` does, with nothing kept that newer ones computed.

        Raises:
            StateError: a newer version is on its way, which takes precedence.
        """
        ...


class EngineFactory(Protocol):
    """The target of an entry point in `paceline.engines`; all arguments are keywords.

    A factory that also takes `settings` (a mapping) gets the rollout pool's settings for it.
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
        """Create an engine without starting it. `model_dir` has small model files, no weights."""
        ...
