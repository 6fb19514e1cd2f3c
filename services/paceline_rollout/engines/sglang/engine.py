"""SGLang behind the engine protocol: requests, swaps, and what happens when the server dies."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, StateError, UnavailableError
from paceline.interfaces import Emission, EngineStatus, Generation
from paceline.logs import Log
from paceline_rollout.activation import Activation, Gate, Line, Swap, parse_activation
from paceline_rollout.engines.base import (
    Limits,
    Outbox,
    Snapshot,
    decoder,
    problem,
    refusal,
    version_gone,
)
from paceline_rollout.engines.sglang import answers
from paceline_rollout.engines.sglang.answers import Slot
from paceline_rollout.engines.sglang.api import SglangClient
from paceline_rollout.engines.sglang.connection import Connection, Link, pause_s
from paceline_rollout.engines.sglang.layout import Layout, vocab_size

SCORE_S = 120.0
DRAIN_S = 60.0
ABORT_AGAIN_S = 0.5
Seconds = dict[str, float]
log = Log("engine")


class SglangEngine:
    """One SGLang server at a time; `make.sglang` says which."""

    def __init__(
        self,
        *,
        connection: Connection,
        model_dir: Path,
        tokenizer_dir: Path | None,
        dtype: str,
        max_context: int,
        max_concurrent: int,
        job_id: str,
        deterministic: bool = False,
        stall_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._model_dir = model_dir
        self._decode = decoder(tokenizer_dir)
        self._limits = Limits(vocab_size(model_dir), max_context, self._decode is not None)
        self._dtype = dtype
        self._max_concurrent = max_concurrent
        self._job_id = job_id
        self._deterministic = deterministic
        self._stall_s = stall_s
        self._clock = clock
        self._gate = Gate()
        self._line: Line[Slot] = Line(self._gate)
        self._running: dict[str, Slot] = {}
        self._layout: Layout | None = None
        self._snapshot: Snapshot | None = None  # what a restarted server is given
        self._lost = ""  # why nothing is served, although something was
        self._swap: Swap | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._prefix = secrets.token_hex(10)
        self._calls = 0
        self._counts = {"tokens": 0, "prompt": 0, "cached": 0}
        self._seconds: Seconds = {"busy": 0.0, "idle": 0.0, "swap": 0.0}
        self._seen = clock()
        self._heard = clock()  # when the server last said something, or had nothing to say
        self._outbox = Outbox()

    async def start(self) -> None:
        """Start the server with weights of no meaning; requests wait for the first `load`."""
        await self._connection.open()
        self._spawn(self._supervise(), "sglang")
        self._spawn(self._watch(), "watch")

    def submit(self, batch: Sequence[Generation]) -> None:
        """Queue requests."""
        for request in batch:
            if wrong := problem(request, self._limits):
                self._put(refusal(request.request_id, "INVALID_ARGUMENT", wrong))
            elif self._lost:
                self._put(refusal(request.request_id, "UNAVAILABLE", self._lost))
            elif not self._line.add(answers.slot_for(request, self._limits)):
                self._put(version_gone(request, self._gate.version))
        self._pump()

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; unknown ids are ignored."""
        for name in request_ids:
            slot = self._running.get(name)
            if slot is None:
                if self._line.pop(name) is not None:
                    self._put(answers.closing(name, "abort"))
            elif not slot.aborted:
                slot.aborted = True
                self._spawn(self._abort(slot), "abort")
        self._pump()

    def emissions(self) -> AsyncIterator[list[Emission]]:
        """Everything that comes out, in batches."""
        return self._outbox.batches()

    async def load(self, snapshot: Any, activation: str) -> None:
        """Swap weights when the activation allows it; returns when it is done.

        Raises:
            StateError: a newer version displaced this one, or is active.
            InvalidError: the snapshot does not fit the model; the old version stays.
            PacelineError: it could not be loaded; nothing is served until another load.
        """
        wanted = parse_activation(activation)
        if self._layout is None:
            self._layout = await asyncio.to_thread(Layout, self._model_dir)
        self._layout.check(snapshot)
        swap = Swap(snapshot, wanted)
        self._gate.propose(swap)
        self._pump()
        await asyncio.wrap_future(swap.done)

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of tokens[1:] at temperature 1 under the active version."""
        client = self._connection.live.client
        body = answers.score_body(self._next_rid(), tokens, self._gate.version)
        return answers.prompt_logprobs(await client.generate(body, timeout_s=SCORE_S))

    @property
    def url(self) -> str:
        """Where the server answers; another place after each restart."""
        return self._connection.server.url

    async def checksums(self) -> list[dict[str, str]]:
        """Of the tensors of each rank: equal between replicas of one version."""
        return await self._connection.live.client.checksums()

    def status(self) -> EngineStatus:
        """Counters now; version -1 while nothing is served."""
        self._tick()
        return EngineStatus(
            engine="sglang",
            precision=self._dtype,
            version=self._gate.version,
            running=len(self._running),
            waiting=len(self._line),
            tokens_generated=self._counts["tokens"],
            prompt_tokens=self._counts["prompt"],
            max_context=self._limits.max_context,
            vocab_size=self._limits.vocab_size,
            busy_s=self._seconds["busy"],
            idle_s=self._seconds["idle"],
            swap_s=self._seconds["swap"],
            cached_tokens=self._counts["cached"],
        )

    async def close(self) -> None:
        """Abort everything and stop the server."""
        self._lost = "the engine is closing"
        for slot in [*self._running.values(), *self._line.clear()]:
            self._running.pop(slot.request_id, None)
            self._put(answers.closing(slot.request_id, "abort"))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for swap in (self._swap, self._gate.pending):
            if swap is not None and not swap.done.done():
                swap.fail(UnavailableError(self._lost))
        self._gate.pending = self._swap = None
        await self._connection.drop()
        await self._connection.server.stop()
        self._outbox.close()

    # requests -------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Start what may start: a swap that is due, else requests."""
        link = self._connection.link
        if self._swap is not None or link is None:
            return
        if self._swap_due():
            self._tick()
            self._swap = self._gate.pending
            self._spawn(self._exchange(), "swap")
            return
        free = self._max_concurrent - len(self._running)
        for slot in list(islice(self._line.startable(), max(free, 0))):
            self._line.pop(slot.request_id)
            self._begin(slot, link.client)

    def _begin(self, slot: Slot, client: SglangClient) -> None:
        self._tick()
        slot.rid, slot.version = self._next_rid(), self._gate.version
        slot.seen, slot.runs = 0, []
        if not self._running:
            self._heard = self._clock()
        self._running[slot.request_id] = slot
        self._counts["prompt"] += len(slot.request.tokens) + len(slot.tokens)
        slot.task = self._spawn(self._generate(slot, client), "generate")

    async def _generate(self, slot: Slot, client: SglangClient) -> None:
        """One call of the server, from its request to its end."""
        end: Mapping[str, Any] = {}
        error = UnavailableError("the SGLang server left the answer without an end")
        try:
            body = answers.body_of(slot, deterministic=self._deterministic)
            async with aclosing(client.stream(body)) as events:
                async for event in events:
                    end = self._take(slot, event)
                    if end.get("cut"):  # leaving the stream makes the server abort
                        break
        except PacelineError as failure:
            error = (
                failure
                if isinstance(failure, UnavailableError)
                else PacelineError(f"sglang: {failure}")
            )
        self._tick()
        if self._running.pop(slot.request_id, None) is not None:
            self._finish(slot, end, error)
        self._pump()

    def _take(self, slot: Slot, event: Mapping[str, Any]) -> Mapping[str, Any]:
        """Emit what an event brings; how the answer ends, if it does."""
        self._heard = self._clock()
        end: Mapping[str, Any] = event["meta_info"].get("finish_reason") or {}
        if end:
            self._counts["cached"] += int(event["meta_info"].get("cached_tokens") or 0)
        if end and (wrong := answers.mislabelled(slot, event)):
            log.warning("versions differ", job=self._job_id, tokens=wrong)
        if answers.stale_start(slot, event):
            return {"type": "stale", "cut": True}
        emission = answers.take(slot, event)
        if emission is None:
            return end
        if self._decode is not None and slot.request.sampling.stop_strings:
            emission, hit = answers.cut_at_stop(slot, emission, self._decode)
            end = {"type": "stop", "matched": hit, "cut": True} if hit else end
        self._counts["tokens"] += len(emission.tokens)
        self._put(emission)
        return end

    def _finish(self, slot: Slot, end: Mapping[str, Any], error: PacelineError) -> None:
        reason, matched = answers.verdict(slot, end)
        if reason == "again":
            slot.again = False
            self._line.add(slot, first=True)
        elif reason == "error":
            text = str(end.get("message") or error)
            code = "UNAVAILABLE" if isinstance(error, UnavailableError) else "INTERNAL"
            self._put(refusal(slot.request_id, code, text))
        else:
            self._put(answers.closing(slot.request_id, reason, matched))

    async def _abort(self, slot: Slot) -> None:
        """Ask until the answer ends: a call that has not arrived yet cannot be aborted."""
        task, link = slot.task, self._connection.link
        while task is not None and link is not None and not task.done():
            try:
                await link.client.abort(slot.rid)
            except PacelineError as error:
                log.info("not aborted", error=error)
            await asyncio.wait({task}, timeout=ABORT_AGAIN_S)

    # swapping -------------------------------------------------------------------------------

    def _swap_due(self) -> bool:
        held = sum(slot.request.pinned_version >= 0 for slot in self._running.values())
        return self._gate.due(running=len(self._running), pinned=held + self._line.num_pinned)

    async def _exchange(self) -> None:
        swap = self._swap
        assert swap is not None
        try:
            await self._replace(swap, self._connection.live)
        except PacelineError as error:
            log.error("weights not loaded", job=self._job_id, version=swap.version, error=error)
            self._lose(f"version {swap.version} could not be loaded: {error}")
            if self._gate.pending is swap:
                self._gate.finish(error)
        else:
            self._arrived(swap)
        self._tick()
        self._swap = None
        self._pump()

    async def _replace(self, swap: Swap, link: Link) -> None:
        client, spans = link.client, link.capabilities.spans
        keeps = swap.activation is Activation.IN_FLIGHT and spans and bool(self._running)
        try:
            if spans:
                await client.pause("in_place" if keeps else "retract")
                # An answer of the scheduler comes after all tokens it made before it paused.
                await client.server_info()
            else:
                await self._interrupt(client)
            # With the cache in use it cannot be emptied; new requests do not share it anyway.
            await link.loader.load(swap.snapshot, flush=not keeps)
        finally:
            await client.resume()

    async def _interrupt(self, client: SglangClient) -> None:
        """Take running requests out of a server that could not say which version made what."""
        tasks = [slot.task for slot in self._running.values() if slot.task is not None]
        for slot in self._running.values():
            slot.again = True
        await client.pause("abort")
        if tasks:
            await asyncio.wait(tasks, timeout=DRAIN_S)

    def _arrived(self, swap: Swap) -> None:
        """The server has these weights, whatever has been proposed in the meantime."""
        self._snapshot, self._lost = swap.snapshot, ""
        if self._gate.pending is swap:
            self._gate.finish()
        else:
            self._gate.version = swap.version
            newer = self._gate.pending
            if newer is not None and newer.version < swap.version:
                self._gate.finish(StateError(f"version {swap.version} is active"))
        for slot in self._line.swapped():
            self._put(version_gone(slot.request, self._gate.version))

    # the server -----------------------------------------------------------------------------

    async def _supervise(self) -> None:
        while True:
            reason = await self._connection.server.died()
            log.error("server lost", job=self._job_id, reason=reason)
            self._lose(reason)
            await self._connection.drop()
            await self._connection.reopen()
            self._pump()
            self._spawn(self._restore(), "restore")

    async def _watch(self) -> None:
        """End a server that lives but has fallen silent over its requests."""
        while True:
            await asyncio.sleep(self._stall_s / 8)
            if not self._running or self._swap is not None:
                self._heard = self._clock()
            elif self._clock() - self._heard > self._stall_s:
                log.error("server silent", job=self._job_id, seconds=self._stall_s)
                self._heard = self._clock()
                await self._connection.server.stop()

    async def _restore(self) -> None:
        """Give a new server what the old one had, unless something newer is on its way."""
        attempt = 0
        while self._gate.version < 0 and self._gate.pending is None and self._snapshot is not None:
            swap = Swap(self._snapshot, Activation.IN_FLIGHT)
            self._gate.propose(swap)
            self._pump()
            try:
                await asyncio.wrap_future(swap.done)
            except PacelineError as error:
                log.warning("not restored", job=self._job_id, version=swap.version, error=error)
                await asyncio.sleep(pause_s(attempt))
                attempt += 1

    def _lose(self, reason: str) -> None:
        """No valid version: all callers go on elsewhere, with the tokens they have."""
        self._tick()
        self._lost = f"{reason}; go on elsewhere"
        self._gate.version = -1
        for slot in [*self._running.values(), *self._line.clear()]:
            self._running.pop(slot.request_id, None)
            self._put(refusal(slot.request_id, "UNAVAILABLE", self._lost))
            if slot.task is not None:
                slot.task.cancel()

    # helpers --------------------------------------------------------------------------------

    def _put(self, emission: Emission) -> None:
        self._outbox.put([emission])

    def _next_rid(self) -> str:
        """SGLang aborts all ids that begin with the one given, so all have one length."""
        self._calls += 1
        return f"{self._prefix}{self._calls:012x}"

    def _tick(self) -> None:
        """Book the time since the last change."""
        now = self._clock()
        kind = "swap" if self._swap is not None else "busy" if self._running else "idle"
        self._seconds[kind] += now - self._seen
        self._seen = now

    def _spawn(self, work: Any, name: str) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the engine failed", task=task.get_name(), error=task.exception())
            self._outbox.close()
