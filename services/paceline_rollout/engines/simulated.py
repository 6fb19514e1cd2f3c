"""An engine without a model: it simulates rates, lengths of answers and failures.

All running requests decode at one rate, so their progress follows from a single number: how many
tokens a slot would have decoded since the start. Work is done once per tick, not per token.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from paceline.enums import FinishReason
from paceline.errors import InvalidError, UnavailableError
from paceline.platform.telemetry.logs import Log
from paceline.plugins import (
    EngineLimits,
    EngineOutput,
    EngineRequest,
    EngineStatus,
    error_output,
    request_problem,
)
from paceline_rollout.activation import Activation, Gate, RequestQueue, Swap, parse_activation
from paceline_rollout.engines.base import (
    OutputQueue,
    emit,
    encoder,
    uniform_logprob,
    version_gone,
)
from paceline_rollout.engines.units import MASK, unit, units

log = Log("engine")
_LENGTH_KINDS = ("fixed", "uniform", "lognormal")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of answers in tokens: `fixed` mean, `uniform` from low to high, or `lognormal`."""

    kind: str = "fixed"
    mean: float = 16.0
    sigma: float = 0.5
    low: int = 1
    high: int = 32

    def draw(self, seed: int) -> int:
        """The length for a seed."""
        if self.kind == "fixed":
            return max(1, round(self.mean))
        u = unit(seed, 0)
        if self.kind == "uniform":
            return self.low + int(u * (self.high - self.low + 1))
        angle = 2 * math.pi * unit(seed, 1)
        normal = math.sqrt(-2 * math.log(max(u, 1e-12))) * math.cos(angle)
        return max(1, round(self.mean * math.exp(self.sigma * normal - self.sigma**2 / 2)))


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request and its progress, in units of `SimulatedEngine._decoded`."""

    request: EngineRequest
    total: int  # tokens that will be sampled
    reason: FinishReason
    stop: int  # the stop token that ends the answer; -1: none
    start: float = 0.0  # `_decoded` before its first token
    emitted: int = 0
    submitted_at: float = 0.0  # in seconds of the clock, as the two below
    prefill_at: float = 0.0
    decode_at: float = 0.0

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self.request.request_id

    @property
    def end(self) -> float:
        """`_decoded` at its last token."""
        return self.start + self.total


class SimulatedEngine:
    """An engine whose speed is set by options; an answer depends only on its request's seed."""

    def __init__(
        self,
        *,
        model_dir: Path | None,
        dtype: str,
        max_context: int,
        max_concurrent: int,
        threads: int,
        tokenizer_dir: Path | None,
        job_id: str,
        vocab_size: int = 0,
        prefill_tokens_per_s: float = 100_000.0,
        decode_tokens_per_s: float = 50.0,
        batch_tokens_per_s: float = 0.0,
        length: Mapping[str, Any] | None = None,
        failure_rate: float = 0.0,
        replies: Sequence[str] = (),
        load_s: float = 0.0,
        tick_s: float = 0.01,
        flush_s: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`replies`: texts that are answered, one by the seed, instead of random tokens."""
        _check(prefill_tokens_per_s > 0, "prefill_tokens_per_s", prefill_tokens_per_s, "above 0")
        _check(decode_tokens_per_s > 0, "decode_tokens_per_s", decode_tokens_per_s, "above 0")
        _check(batch_tokens_per_s >= 0, "batch_tokens_per_s", batch_tokens_per_s, "0 (off) or more")
        _check(0 <= failure_rate <= 1, "failure_rate", failure_rate, "0 to 1")
        vocab_size = vocab_size or _vocab_size(model_dir)
        _check(vocab_size >= 2, "vocab_size", vocab_size, "at least 2")
        _check(tick_s > 0, "tick_s", tick_s, "above 0")
        self._limits = EngineLimits(vocab_size, max_context, stop_strings=True)
        self._dtype = dtype
        self._max_concurrent = max_concurrent
        self._prefill_rate = prefill_tokens_per_s
        self._decode_rate = decode_tokens_per_s
        self._batch_rate = batch_tokens_per_s
        self._lengths = _lengths(length or {})
        self._failure_rate = failure_rate
        self._replies = _encoded(replies, tokenizer_dir)
        self._load_s = load_s
        self._tick_s = tick_s
        self._flush_s = flush_s
        self._clock = clock
        self._gate = Gate()
        self._queue: RequestQueue[SimulatedRequest] = RequestQueue(self._gate)
        self._prefilling: dict[str, SimulatedRequest] = {}  # in order
        self._running: dict[str, SimulatedRequest] = {}
        self._ends: list[tuple[float, int, SimulatedRequest]] = []
        self._order = 0
        self._decoded = 0.0  # tokens that a slot would have decoded since the start
        self._prefill_done = 0.0  # tokens of the first request in `_prefilling`
        self._updated_at = self._flushed_at = clock()
        self._counts = {"tokens": 0, "prompt": 0}
        self._seconds = {"busy": 0.0, "idle": 0.0, "swap": 0.0}
        self._canary: dict[tuple[int, ...], list[float]] = {}
        self._outputs: list[EngineOutput] = []
        self._output_queue = OutputQueue()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the clock."""
        self._updated_at = self._flushed_at = self._clock()
        self._task = asyncio.create_task(self._run(), name="simulated")
        self._task.add_done_callback(self._on_stop)

    def submit(self, batch: Sequence[EngineRequest]) -> None:
        """Queue requests."""
        for request in batch:
            if problem := request_problem(request, self._limits):
                self._outputs.append(error_output(request.request_id, "INVALID_ARGUMENT", problem))
            elif not self._queue.add(
                replace(self._make_entry(request), submitted_at=self._clock())
            ):
                self._outputs.append(version_gone(request, self._gate.version))
        self._wake.set()

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; unknown ids are ignored."""
        for name in request_ids:
            running = self._running.pop(name, None)
            if running is not None:
                self._emit(running, self._progress(running), FinishReason.ABORT)
            elif self._queue.pop(name) is not None or self._prefilling.pop(name, None) is not None:
                self._outputs.append(emit(name, (), (), version=-1, reason=FinishReason.ABORT))
        self._wake.set()

    def emissions(self) -> AsyncIterator[list[EngineOutput]]:
        """All outputs, in batches."""
        return self._output_queue.batches()

    async def load(self, snapshot: Any, activation: str) -> None:
        """Swap when the activation allows it; takes `load_s`, during which nothing decodes."""
        await self._load(Swap(snapshot, parse_activation(activation)))

    async def roll_back(self, snapshot: Any) -> None:
        """Swap to older weights; running requests are computed anew."""
        await self._load(Swap.back_to(snapshot))

    async def _load(self, swap: Swap) -> None:
        self._gate.propose(swap)
        self._wake.set()
        await asyncio.wrap_future(swap.done)

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """The log-probs of the snapshot's canary for its tokens, else those of a uniform policy."""
        known = self._canary.get(tuple(tokens))
        return known or [uniform_logprob(self._limits.vocab_size)] * (len(tokens) - 1)

    def status(self) -> EngineStatus:
        """Current counters."""
        return EngineStatus(
            engine="simulated",
            precision=self._dtype,
            version=self._gate.version,
            running=len(self._running) + len(self._prefilling),
            waiting=len(self._queue),
            tokens_generated=self._counts["tokens"],
            prompt_tokens=self._counts["prompt"],
            max_context=self._limits.max_context,
            vocab_size=self._limits.vocab_size,
            busy_s=self._seconds["busy"],
            idle_s=self._seconds["idle"],
            swap_s=self._seconds["swap"],
        )

    async def close(self) -> None:
        """Abort everything and stop the clock."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._gate.pending is not None:
            self._gate.finish(UnavailableError("the engine is closing"))
        waiting = [entry.request_id for entry in self._queue.clear()]
        self._outputs.extend(
            emit(name, (), (), version=-1, reason=FinishReason.ABORT) for name in waiting
        )
        self.abort([*self._running, *self._prefilling])
        self._output_queue.put(self._outputs)
        self._output_queue.close()

    # the clock ------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            busy = await self._sleep()
            now = self._clock()
            passed, self._updated_at = now - self._updated_at, now
            self._seconds["busy" if busy else "idle"] += passed
            if busy:
                self._advance(passed)
            if self._swap_due():
                await self._swap()
            self._start_prefills()
            if now - self._flushed_at >= self._flush_s:
                self._flushed_at = now
                self._flush()
            if self._outputs:
                batch, self._outputs = self._outputs, []
                self._output_queue.put(batch)

    def _on_stop(self, task: asyncio.Task[None]) -> None:
        """End the outputs if the task has failed; `close` ends them itself."""
        if not task.cancelled():
            log.error("engine task failed", error=task.exception())
            self._output_queue.close()

    async def _sleep(self) -> bool:
        """Wait for the next tick or, if idle, for a command; returns whether requests ran."""
        if self._running or self._prefilling:
            await asyncio.sleep(self._tick_s)
            return True
        await self._wake.wait()
        self._wake.clear()
        return False

    def _advance(self, passed_s: float) -> None:
        """Simulate the passing of time: requests decode while others are prefilled."""
        rate = self._decode_rate
        if self._batch_rate and self._running:
            rate = min(rate, self._batch_rate / len(self._running))
        self._decoded += rate * passed_s
        self._prefill(passed_s * self._prefill_rate)
        while self._ends and self._ends[0][0] <= self._decoded:
            _, _, entry = heapq.heappop(self._ends)
            if self._running.get(entry.request_id) is entry and entry.end <= self._decoded:
                del self._running[entry.request_id]
                self._emit(entry, entry.total, entry.reason)

    def _prefill(self, budget: float) -> None:
        while self._prefilling:
            entry = next(iter(self._prefilling.values()))
            need = len(entry.request.tokens) + entry.emitted - self._prefill_done
            if budget < need:
                self._prefill_done += budget
                return
            budget -= need
            self._prefill_done = 0.0
            del self._prefilling[entry.request_id]
            self._counts["prompt"] += len(entry.request.tokens) + entry.emitted
            entry.start = self._decoded - entry.emitted
            entry.decode_at = entry.decode_at or self._updated_at
            self._running[entry.request_id] = entry
            self._order += 1
            heapq.heappush(self._ends, (entry.end, self._order, entry))

    def _start_prefills(self) -> None:
        free = self._max_concurrent - len(self._running) - len(self._prefilling)
        for entry in list(islice(self._queue.startable(), max(free, 0))):
            self._queue.pop(entry.request_id)
            self._prefilling[entry.request_id] = entry
            entry.prefill_at = entry.prefill_at or self._updated_at

    def _flush(self) -> None:
        for entry in self._running.values():
            self._emit(entry, self._progress(entry), None)

    # swapping -------------------------------------------------------------------------------

    def _swap_due(self) -> bool:
        if self._gate.pending is None:
            return False
        running = [*self._running.values(), *self._prefilling.values()]
        pinned = sum(entry.request.pinned_version >= 0 for entry in running)
        return self._gate.due(running=len(running), pinned=pinned + self._queue.num_pinned)

    async def _swap(self) -> None:
        swap = self._gate.pending
        assert swap is not None
        self._flush()
        await asyncio.sleep(self._load_s)
        now = self._clock()
        self._seconds["swap"] += now - self._updated_at
        self._updated_at = now
        if self._gate.pending is not swap:
            self._wake.set()
            return
        if swap.activation is Activation.INTERRUPT:
            for entry in reversed([*self._running.values(), *self._prefilling.values()]):
                self._queue.add(entry, first=True)
            self._running.clear()
            self._prefilling.clear()
            self._ends.clear()
        header = swap.snapshot.header
        self._canary = {each.tokens: list(each.logprobs) for each in header.canary.sequences}
        self._gate.finish()
        for entry in self._queue.swapped():
            self._outputs.append(version_gone(entry.request, self._gate.version))

    # answers --------------------------------------------------------------------------------

    def _make_entry(self, request: EngineRequest) -> SimulatedRequest:
        s = request.sampling
        max_tokens = min(s.max_tokens, self._limits.max_context - len(request.tokens))
        drawn = len(self._reply(s.seed)) + 1 if self._replies else self._lengths.draw(s.seed)
        wanted = max(drawn - request.sampled, 1)
        if unit(s.seed, 2) < self._failure_rate:
            return SimulatedRequest(request, min(wanted, max_tokens), FinishReason.ERROR, -1)
        if wanted > max_tokens:
            return SimulatedRequest(request, max_tokens, FinishReason.LENGTH, -1)
        stop = s.stop_tokens[0] if s.stop_tokens else -1
        return SimulatedRequest(request, wanted, FinishReason.STOP, stop)

    def _progress(self, entry: SimulatedRequest) -> int:
        # The last token is emitted with the finish reason, never by a flush.
        return max(min(int(self._decoded - entry.start), entry.total - 1), entry.emitted)

    def _emit(self, entry: SimulatedRequest, num_tokens: int, reason: FinishReason | None) -> None:
        count = num_tokens - entry.emitted
        if reason is FinishReason.ERROR:
            self._outputs.append(error_output(entry.request_id, "INTERNAL", "simulated failure"))
            return
        if not count and not reason:
            return
        first = len(entry.request.tokens) + entry.emitted
        if self._replies:
            done = entry.request.sampled + entry.emitted
            # The last one is the stop token.
            tokens = [*self._reply(entry.request.sampling.seed), 0][done : done + count]
        else:
            tokens = self._tokens(entry.request.sampling.seed, first, count)
        matched = ""
        if reason is FinishReason.STOP and entry.stop >= 0:
            tokens[-1] = entry.stop
            matched = str(entry.stop)
        entry.emitted = num_tokens
        self._counts["tokens"] += count
        logprobs = [uniform_logprob(self._limits.vocab_size)] * count
        output = emit(
            entry.request_id,
            tokens,
            logprobs,
            version=self._gate.version,
            reason=reason,
            matched=matched,
        )
        if reason:
            durations = {
                "queue_s": entry.prefill_at - entry.submitted_at,
                "prefill_s": entry.decode_at - entry.prefill_at,
            }
            output = replace(output, **durations)
        self._outputs.append(output)

    def _reply(self, seed: int) -> list[int]:
        return self._replies[int(unit(seed, 3) * len(self._replies))]

    def _tokens(self, seed: int, first: int, count: int) -> list[int]:
        if count < 16:
            return [
                int(unit(seed, p) * self._limits.vocab_size) for p in range(first, first + count)
            ]
        positions = np.arange(first, first + count, dtype=np.uint64)
        drawn = units(np.uint64(seed & MASK), positions)
        return (drawn * self._limits.vocab_size).astype(np.int64).tolist()


def _lengths(options: Mapping[str, Any]) -> Lengths:
    try:
        lengths = Lengths(**options)
    except TypeError:
        known = ", ".join(Lengths.__slots__)
        raise InvalidError(f"engine.length: {dict(options)}; allowed: {known}") from None
    _check(lengths.kind in _LENGTH_KINDS, "length.kind", lengths.kind, ", ".join(_LENGTH_KINDS))
    _check(lengths.mean > 0, "length.mean", lengths.mean, "above 0")
    _check(
        1 <= lengths.low <= lengths.high, "length.low", lengths.low, f"1 to high ({lengths.high})"
    )
    return lengths


def _encoded(replies: Sequence[str], folder: Path | None) -> list[list[int]]:
    if not replies:
        return []
    encode = encoder(folder)
    if encode is None:
        raise InvalidError("engine.replies: the model has no tokenizer; allowed: no replies")
    return [encode(text) for text in replies]


def _vocab_size(model_dir: Path | None) -> int:
    """The model's vocabulary size, so that a trainer can use the answers; 256 without a model."""
    config = model_dir / "config.json" if model_dir is not None else None
    if config is None or not config.exists():
        return 256
    content: dict[str, Any] = json.loads(config.read_text())
    return int(content.get("vocab_size") or content.get("text_config", {})["vocab_size"])


def _check(valid: bool, name: str, value: object, allowed: str) -> None:
    if not valid:
        raise InvalidError(f"engine.{name}: {value}; allowed: {allowed}")
