"""A clock in the shape of an engine: rates, length laws and failures, but no model.

All running requests decode at one rate, so a single number, the tokens that a slot would have
decoded since the start, says where each of them is. Work is done once per tick, not per token.
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

from paceline.errors import InvalidError, UnavailableError
from paceline.interfaces import Emission, EngineStatus, Generation
from paceline.logs import Log
from paceline_rollout.activation import Activation, Gate, Line, Swap, parse_activation
from paceline_rollout.engines.base import (
    Limits,
    Outbox,
    emit,
    problem,
    refusal,
    uniform_logprob,
    version_gone,
)

log = Log("engine")
_LAWS = ("fixed", "uniform", "lognormal")
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long answers are: `fixed` mean, `uniform` from low to high, `lognormal`."""

    kind: str = "fixed"
    mean: float = 16.0
    sigma: float = 0.5
    low: int = 1
    high: int = 32

    def draw(self, seed: int) -> int:
        """The length that belongs to a seed."""
        if self.kind == "fixed":
            return max(1, round(self.mean))
        u = _unit(seed, 0)
        if self.kind == "uniform":
            return self.low + int(u * (self.high - self.low + 1))
        angle = 2 * math.pi * _unit(seed, 1)
        normal = math.sqrt(-2 * math.log(max(u, 1e-12))) * math.cos(angle)
        return max(1, round(self.mean * math.exp(self.sigma * normal - self.sigma**2 / 2)))


@dataclass(slots=True, eq=False)
class Slot:
    """A request and its place on the clock."""

    request: Generation
    total: int  # tokens it will have
    reason: str  # stop, length or error
    stop: int  # last token of a request that stops; -1: none
    begun: float = 0.0  # the clock when its first token was due, less what it had
    emitted: int = 0
    since: float = 0.0  # when it was submitted, when its prompt was begun, when it joined
    joining: float = 0.0
    joined: float = 0.0

    @property
    def request_id(self) -> str:
        """Its name."""
        return self.request.request_id

    @property
    def due(self) -> float:
        """The clock when its last token is there."""
        return self.begun + self.total


class SimulatedEngine:
    """See the options of `__init__`; the same request seed gives the same answer."""

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
        load_s: float = 0.0,
        tick_s: float = 0.01,
        flush_s: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check(prefill_tokens_per_s > 0, "prefill_tokens_per_s", prefill_tokens_per_s, "above 0")
        _check(decode_tokens_per_s > 0, "decode_tokens_per_s", decode_tokens_per_s, "above 0")
        _check(batch_tokens_per_s >= 0, "batch_tokens_per_s", batch_tokens_per_s, "0 (off) or more")
        _check(0 <= failure_rate <= 1, "failure_rate", failure_rate, "0 to 1")
        vocab_size = vocab_size or _vocab_size(model_dir)
        _check(vocab_size >= 2, "vocab_size", vocab_size, "at least 2")
        _check(tick_s > 0, "tick_s", tick_s, "above 0")
        self._limits = Limits(vocab_size, max_context, stop_strings=True)
        self._dtype = dtype
        self._max_concurrent = max_concurrent
        self._prefill_rate = prefill_tokens_per_s
        self._decode_rate = decode_tokens_per_s
        self._batch_rate = batch_tokens_per_s
        self._lengths = _lengths(length or {})
        self._failure_rate = failure_rate
        self._load_s = load_s
        self._tick_s = tick_s
        self._flush_s = flush_s
        self._clock = clock
        self._gate = Gate()
        self._line: Line[Slot] = Line(self._gate)
        self._joining: dict[str, Slot] = {}  # being prefilled, in order
        self._running: dict[str, Slot] = {}
        self._ends: list[tuple[float, int, Slot]] = []
        self._order = 0
        self._decoded = 0.0  # tokens that a slot would have decoded since the start
        self._prefill_left = 0.0  # tokens of the first joining request
        self._seen = self._flushed = clock()
        self._counts = {"tokens": 0, "prompt": 0}
        self._seconds = {"busy": 0.0, "idle": 0.0, "swap": 0.0}
        self._canary: dict[tuple[int, ...], list[float]] = {}
        self._out: list[Emission] = []
        self._outbox = Outbox()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the clock."""
        self._seen = self._flushed = self._clock()
        self._task = asyncio.create_task(self._run(), name="simulated")
        self._task.add_done_callback(self._stopped)

    def submit(self, batch: Sequence[Generation]) -> None:
        """Queue requests."""
        for request in batch:
            if wrong := problem(request, self._limits):
                self._out.append(refusal(request.request_id, "INVALID_ARGUMENT", wrong))
            elif not self._line.add(replace(self._slot(request), since=self._clock())):
                self._out.append(version_gone(request, self._gate.version))
        self._wake.set()

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; unknown ids are ignored."""
        for name in request_ids:
            running = self._running.pop(name, None)
            if running is not None:
                self._emit(running, self._progress(running), "abort")
            elif self._line.pop(name) is not None or self._joining.pop(name, None) is not None:
                self._out.append(emit(name, (), (), version=-1, reason="abort"))
        self._wake.set()

    def emissions(self) -> AsyncIterator[list[Emission]]:
        """Everything that comes out, in batches."""
        return self._outbox.batches()

    async def load(self, snapshot: Any, activation: str) -> None:
        """Swap when the activation allows it; takes `load_s`, during which nothing decodes."""
        swap = Swap(snapshot, parse_activation(activation))
        self._gate.propose(swap)
        self._wake.set()
        await asyncio.wrap_future(swap.done)

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """A clock has no log-probs: those of the snapshot's canary, else the uniform ones."""
        known = self._canary.get(tuple(tokens))
        return known or [uniform_logprob(self._limits.vocab_size)] * (len(tokens) - 1)

    def status(self) -> EngineStatus:
        """Counters now."""
        return EngineStatus(
            engine="simulated",
            precision=self._dtype,
            version=self._gate.version,
            running=len(self._running) + len(self._joining),
            waiting=len(self._line),
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
        waiting = [slot.request_id for slot in self._line.clear()]
        self._out.extend(emit(name, (), (), version=-1, reason="abort") for name in waiting)
        self.abort([*self._running, *self._joining])
        self._outbox.put(self._out)
        self._outbox.close()

    # the clock ------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            busy = await self._sleep()
            now = self._clock()
            passed, self._seen = now - self._seen, now
            self._seconds["busy" if busy else "idle"] += passed
            if busy:
                self._pass(passed)
            if self._swap_due():
                await self._swap()
            self._join()
            if now - self._flushed >= self._flush_s:
                self._flushed = now
                self._flush()
            if self._out:
                batch, self._out = self._out, []
                self._outbox.put(batch)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """A clock that failed has no more emissions; `close` says so itself."""
        if not task.cancelled():
            log.error("the clock failed", error=task.exception())
            self._outbox.close()

    async def _sleep(self) -> bool:
        """Until the next tick, or while idle until something comes; whether work was going on."""
        if self._running or self._joining:
            await asyncio.sleep(self._tick_s)
            return True
        await self._wake.wait()
        self._wake.clear()
        return False

    def _pass(self, passed_s: float) -> None:
        """Let time go by: prefill first, for whatever joins; decode beside it."""
        rate = self._decode_rate
        if self._batch_rate and self._running:
            rate = min(rate, self._batch_rate / len(self._running))
        self._decoded += rate * passed_s
        self._prefill(passed_s * self._prefill_rate)
        while self._ends and self._ends[0][0] <= self._decoded:
            _, _, slot = heapq.heappop(self._ends)
            if self._running.get(slot.request_id) is slot and slot.due <= self._decoded:
                del self._running[slot.request_id]
                self._emit(slot, slot.total, slot.reason)

    def _prefill(self, budget: float) -> None:
        while self._joining:
            slot = next(iter(self._joining.values()))
            need = len(slot.request.tokens) + slot.emitted - self._prefill_left
            if budget < need:
                self._prefill_left += budget
                return
            budget -= need
            self._prefill_left = 0.0
            del self._joining[slot.request_id]
            self._counts["prompt"] += len(slot.request.tokens) + slot.emitted
            slot.begun, slot.joined = self._decoded - slot.emitted, slot.joined or self._seen
            self._running[slot.request_id] = slot
            self._order += 1
            heapq.heappush(self._ends, (slot.due, self._order, slot))

    def _join(self) -> None:
        free = self._max_concurrent - len(self._running) - len(self._joining)
        for slot in list(islice(self._line.startable(), max(free, 0))):
            self._line.pop(slot.request_id)
            self._joining[slot.request_id] = slot
            slot.joining = slot.joining or self._seen

    def _flush(self) -> None:
        for slot in self._running.values():
            self._emit(slot, self._progress(slot), "")

    # swapping -------------------------------------------------------------------------------

    def _swap_due(self) -> bool:
        if self._gate.pending is None:
            return False
        open_ = [*self._running.values(), *self._joining.values()]
        held = sum(slot.request.pinned_version >= 0 for slot in open_)
        return self._gate.due(running=len(open_), pinned=held + self._line.num_pinned)

    async def _swap(self) -> None:
        swap = self._gate.pending
        assert swap is not None
        self._flush()
        await asyncio.sleep(self._load_s)
        now = self._clock()
        self._seconds["swap"] += now - self._seen
        self._seen = now
        if self._gate.pending is not swap:
            self._wake.set()
            return
        if swap.activation is Activation.INTERRUPT:
            for slot in reversed([*self._running.values(), *self._joining.values()]):
                self._line.add(slot, first=True)
            self._running.clear()
            self._joining.clear()
            self._ends.clear()
        header = swap.snapshot.header
        self._canary = {tuple(header.canary_tokens): list(header.canary_logprobs)}
        self._gate.finish()
        for slot in self._line.swapped():
            self._out.append(version_gone(slot.request, self._gate.version))

    # answers --------------------------------------------------------------------------------

    def _slot(self, request: Generation) -> Slot:
        s = request.sampling
        room = min(s.max_tokens, self._limits.max_context - len(request.tokens))
        wanted = max(self._lengths.draw(s.seed) - request.sampled, 1)
        if _unit(s.seed, 2) < self._failure_rate:
            return Slot(request, min(wanted, room), "error", -1)
        if wanted > room:
            return Slot(request, room, "length", -1)
        stop = s.stop_tokens[0] if s.stop_tokens else -1
        return Slot(request, wanted, "stop", stop)

    def _progress(self, slot: Slot) -> int:
        # The last token comes with the end, so that a flush never takes it away.
        return max(min(int(self._decoded - slot.begun), slot.total - 1), slot.emitted)

    def _emit(self, slot: Slot, upto: int, reason: str) -> None:
        count = upto - slot.emitted
        if reason == "error":
            self._out.append(refusal(slot.request_id, "INTERNAL", "simulated failure"))
            return
        if not count and not reason:
            return
        first = len(slot.request.tokens) + slot.emitted
        tokens = self._tokens(slot.request.sampling.seed, first, count)
        matched = ""
        if reason == "stop" and slot.stop >= 0:
            tokens[-1] = slot.stop
            matched = str(slot.stop)
        slot.emitted = upto
        self._counts["tokens"] += count
        logprobs = [uniform_logprob(self._limits.vocab_size)] * count
        made = emit(
            slot.request_id,
            tokens,
            logprobs,
            version=self._gate.version,
            reason=reason,
            matched=matched,
        )
        if reason:
            waits = {"queue_s": slot.joining - slot.since, "prefill_s": slot.joined - slot.joining}
            made = replace(made, **waits)
        self._out.append(made)

    def _tokens(self, seed: int, first: int, count: int) -> list[int]:
        if count < 16:
            return [
                int(_unit(seed, p) * self._limits.vocab_size) for p in range(first, first + count)
            ]
        positions = np.arange(first, first + count, dtype=np.uint64)
        units = _units(np.uint64(seed & _MASK), positions)
        return (units * self._limits.vocab_size).astype(np.int64).tolist()


def _unit(seed: int, position: int) -> float:
    """In [0, 1), a pure function of seed and position."""
    x = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((x ^ (x >> 31)) >> 11) * 2.0**-53


def _units(seed: Any, positions: Any) -> Any:
    """`_unit` over an array of positions."""
    start = np.uint64((int(seed) * 0x9E3779B97F4A7C15) & _MASK)
    x = start + (positions + np.uint64(1)) * np.uint64(0xD1B54A32D192ED03)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _lengths(options: Mapping[str, Any]) -> Lengths:
    try:
        law = Lengths(**options)
    except TypeError:
        known = ", ".join(Lengths.__slots__)
        raise InvalidError(f"engine.length: {dict(options)}; allowed: {known}") from None
    _check(law.kind in _LAWS, "length.kind", law.kind, ", ".join(_LAWS))
    _check(law.mean > 0, "length.mean", law.mean, "above 0")
    _check(1 <= law.low <= law.high, "length.low", law.low, f"1 to high ({law.high})")
    return law


def _vocab_size(model_dir: Path | None) -> int:
    """That of the model it stands for, so that a trainer can learn from its answers."""
    config = model_dir / "config.json" if model_dir is not None else None
    if config is None or not config.exists():
        return 256
    content: dict[str, Any] = json.loads(config.read_text())
    return int(content.get("vocab_size") or content.get("text_config", {})["vocab_size"])


def _check(fine: bool, name: str, value: object, allowed: str) -> None:
    if not fine:
        raise InvalidError(f"engine.{name}: {value}; allowed: {allowed}")
