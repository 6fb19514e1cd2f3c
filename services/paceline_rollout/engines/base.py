"""What engines have in common: limits of a request, ends of a request, the way out."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from paceline.interfaces import Emission, Generation
from paceline.types import Sampling, VersionRun

Decode = Callable[[list[int]], str]
MAX_STOP_TOKENS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
LEAST_TEMPERATURE = 1e-3
MOST_TEMPERATURE = 100.0
INT64 = range(-(1 << 63), 1 << 63)


class Entry(Protocol):
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


class Header(Protocol):
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


class Snapshot(Protocol):
    """A whole, verified set of weights; `paceline.weights.Staging` is one."""

    @property
    def header(self) -> Header:
        """What it is."""
        ...

    def tensors(self) -> Iterator[tuple[Entry, memoryview]]:
        """Each tensor's entry and bytes."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine can take."""

    vocab_size: int
    max_context: int
    stop_strings: bool  # whether it can decode tokens


def problem(request: Generation, limits: Limits) -> str:
    """Why a request cannot be served: field, value, what is allowed. Empty if it can."""
    tokens = request.tokens
    if not tokens:
        return "tokens: is empty; at least 1 is needed"
    if len(tokens) >= limits.max_context:
        return f"tokens: {len(tokens)} of them; allowed: fewer than {limits.max_context}"
    if min(tokens) < 0 or max(tokens) >= limits.vocab_size:
        return _foreign("tokens", tokens, limits)
    if not 0 <= request.sampled < len(tokens):
        return f"sampled: {request.sampled}; allowed: 0 to {len(tokens) - 1}"
    if not -1 <= request.pinned_version < INT64.stop:
        return f"pinned_version: {request.pinned_version}; allowed: -1 or a version"
    return _sampling_problem(request.sampling, limits)


def _sampling_problem(s: Sampling, limits: Limits) -> str:
    heat = f"0 or {LEAST_TEMPERATURE} to {MOST_TEMPERATURE:g}"
    warm = LEAST_TEMPERATURE <= s.temperature <= MOST_TEMPERATURE
    strings = s.stop_strings
    # Written so that a NaN is refused.
    checks: tuple[tuple[bool, str, object, str], ...] = (
        (s.max_tokens >= 1, "max_tokens", s.max_tokens, "at least 1"),
        (s.temperature == 0 or warm, "temperature", s.temperature, heat),
        (0 < s.top_p <= 1, "top_p", s.top_p, "above 0, at most 1"),
        (s.top_k >= 0, "top_k", s.top_k, "0 (off) or more"),
        (0 <= s.min_p <= 1, "min_p", s.min_p, "0 to 1"),
        (s.seed in INT64, "seed", s.seed, "64-bit integers"),
        (len(s.stop_tokens) <= MAX_STOP_TOKENS, "stop_tokens", "too many", f"{MAX_STOP_TOKENS}"),
        (len(strings) <= MAX_STOP_STRINGS, "stop_strings", "too many", f"{MAX_STOP_STRINGS}"),
        (all(strings), "stop_strings", "''", "texts that are not empty"),
        (all(len(x) <= MAX_STOP_CHARS for x in strings), "stop_strings", "too long", "256 chars"),
        (limits.stop_strings or not strings, "stop_strings", strings, "none without a tokenizer"),
    )
    for fine, name, value, allowed in checks:
        if not fine:
            return f"sampling.{name}: {value}; allowed: {allowed}"
    stops = s.stop_tokens
    if stops and (min(stops) < 0 or max(stops) >= limits.vocab_size):
        return _foreign("sampling.stop_tokens", stops, limits)
    return ""


def _foreign(name: str, tokens: Sequence[int], limits: Limits) -> str:
    wrong = next(t for t in tokens if not 0 <= t < limits.vocab_size)
    return f"{name}: id {wrong} is not in the vocabulary; allowed: 0 to {limits.vocab_size - 1}"


def refusal(request_id: str, code: str, text: str) -> Emission:
    """The end of a request that cannot go on."""
    return Emission(
        request_id=request_id,
        tokens=(),
        logprobs=(),
        versions=(),
        finish_reason="error",
        error_code=code,
        error=text,
    )


def version_gone(request: Generation, active: int) -> Emission:
    """The end of a request whose version is no longer served."""
    text = f"pinned_version: {request.pinned_version} is gone; version {active} is active"
    return refusal(request.request_id, "FAILED_PRECONDITION", text)


def emit(
    request_id: str,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    *,
    version: int,
    reason: str = "",
    matched: str = "",
) -> Emission:
    """Tokens that one version sampled."""
    runs = (VersionRun(version, len(tokens)),) if tokens else ()
    return Emission(
        request_id=request_id,
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        versions=runs,
        finish_reason=reason,
        matched_stop=matched,
    )


def uniform_logprob(vocab_size: int) -> float:
    """The log-prob of every token under a policy that prefers none."""
    return -math.log(vocab_size)


def decoder(folder: Path | None) -> Decode | None:
    """From token ids to text, if there is a tokenizer."""
    if folder is None or not (folder / "tokenizer.json").exists():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return partial(tokenizer.decode, skip_special_tokens=False)


def stop_window(strings: Sequence[str]) -> int:
    """Newest tokens that matter: a stop of n bytes ends within n of them, in any vocabulary."""
    return max(len(text.encode()) for text in strings) + 4


def stop_in(text: str, strings: Sequence[str]) -> str:
    """The first of the stop strings that is in a text; empty if none is."""
    return next((stop for stop in strings if stop in text), "")


class Outbox:
    """Emissions on their way to the one consumer, in as few batches as its pace allows."""

    def __init__(self) -> None:
        self._held: list[Emission] = []
        self._wake = asyncio.Event()
        self._closed = False

    def put(self, batch: Sequence[Emission]) -> None:
        """Hand over; on the event loop's thread."""
        self._held.extend(batch)
        self._wake.set()

    def close(self) -> None:
        """No more will come."""
        self._closed = True
        self._wake.set()

    async def batches(self) -> AsyncIterator[list[Emission]]:
        """All that came since the last batch; ends after `close`."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._held:
                batch, self._held = self._held, []
                yield batch
            if self._closed and not self._held:
                return
