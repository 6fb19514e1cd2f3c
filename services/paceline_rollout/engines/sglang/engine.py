"""SGLang behind the engine protocol: requests, swaps, restarts of the server."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.enums import FinishReason
from paceline.errors import PacelineError, StateError, UnavailableError
from paceline.platform.telemetry.logs import Log
from paceline.plugins import (
    EngineLimits,
    EngineOutput,
    EngineRequest,
    EngineStatus,
    WeightSnapshot,
    error_output,
    request_problem,
)
from paceline_rollout.activation import Activation, Gate, RequestQueue, Swap, parse_activation
from paceline_rollout.engines.base import OutputQueue, decoder, version_gone
from paceline_rollout.engines.sglang import answers
from paceline_rollout.engines.sglang.answers import ServerRequest
from paceline_rollout.engines.sglang.api import SglangClient
from paceline_rollout.engines.sglang.connection import (
    ServerConnection,
    ServerSession,
    retry_delay_s,
)
from paceline_rollout.engines.sglang.layout import Layout, vocab_size
from paceline_rollout.engines.sglang.proof import ProofByChanges

SCORE_TIMEOUT_S = 120.0
INTERRUPT_TIMEOUT_S = 60.0
ABORT_RETRY_S = 0.5
Seconds = dict[str, float]
log = Log("engine")


class SglangEngine:
    """An engine backed by one SGLang server; built by `make.sglang`."""

    def __init__(
        self,
        *,
        connection: ServerConnection,
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
        self._limits = EngineLimits(vocab_size(model_dir), max_context, self._decode is not None)
        self._dtype = dtype
        self._max_concurrent = max_concurrent
        self._job_id = job_id
        self._deterministic = deterministic
        self._stall_s = stall_s
        self._clock = clock
        self._gate = Gate()
        self._queue: RequestQueue[ServerRequest] = RequestQueue(self._gate)
        self._running: dict[str, ServerRequest] = {}
        self._layout: Layout | None = None
        self._proof = ProofByChanges()
        self._snapshot: WeightSnapshot | None = None  # to load into a restarted server
        self._unavailable = ""  # why requests are refused; empty: they are not
        self._swap: Swap | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._prefix = secrets.token_hex(10)
        self._calls = 0
        self._counts = {"tokens": 0, "prompt": 0, "cached": 0}
        self._seconds: Seconds = {"busy": 0.0, "idle": 0.0, "swap": 0.0}
        self._updated_at = clock()
        self._last_event_at = clock()  # or the last time without requests
        self._output_queue = OutputQueue()

    async def start(self) -> None:
        """Start the server with dummy weights; requests wait for the first `load`."""
        await self._connection.open()
        self._spawn(self._supervise(), "sglang")
        self._spawn(self._watch(), "watch")

    def submit(self, batch: Sequence[EngineRequest]) -> None:
        """Queue requests."""
        for request in batch:
            if problem := request_problem(request, self._limits):
                self._put(error_output(request.request_id, "INVALID_ARGUMENT", problem))
            elif self._unavailable:
                self._put(error_output(request.request_id, "UNAVAILABLE", self._unavailable))
            elif not self._queue.add(answers.make_request(request, self._limits)):
                self._put(version_gone(request, self._gate.version))
        self._schedule()

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; unknown ids are ignored."""
        for name in request_ids:
            server_request = self._running.get(name)
            if server_request is None:
                if self._queue.pop(name) is not None:
                    self._put(answers.closing(name, FinishReason.ABORT))
            elif not server_request.aborted:
                server_request.aborted = True
                self._spawn(self._abort(server_request), "abort")
        self._schedule()

    def emissions(self) -> AsyncIterator[list[EngineOutput]]:
        """All outputs, in batches."""
        return self._output_queue.batches()

    async def load(self, snapshot: Any, activation: str) -> None:
        """Swap weights as soon as the activation allows it; returns after the swap.

        Raises:
            StateError: a newer version displaced this one, or is active.
            InvalidError: the snapshot does not fit the model; the old version stays.
            PacelineError: it could not be loaded; requests are refused until another load.
        """
        await self._load(Swap(snapshot, parse_activation(activation)))

    async def roll_back(self, snapshot: Any) -> None:
        """Swap to older weights; running requests are computed anew.

        Raises:
            StateError: a newer version is on its way.
        """
        await self._load(Swap.back_to(snapshot))

    async def _load(self, swap: Swap) -> None:
        if self._layout is None:
            self._layout = await asyncio.to_thread(Layout, self._model_dir)
        self._layout.check(swap.snapshot)
        self._gate.propose(swap)
        self._schedule()
        await asyncio.wrap_future(swap.done)

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of tokens[1:] at temperature 1 under the active version."""
        client = self._connection.live.client
        body = answers.score_body(self._next_rid(), tokens, self._gate.version)
        return answers.prompt_logprobs(await client.generate(body, timeout_s=SCORE_TIMEOUT_S))

    @property
    def url(self) -> str:
        """URL of the server; it changes with each restart."""
        return self._connection.server.url

    async def checksums(self) -> list[dict[str, str]]:
        """Checksums of each rank's tensors; equal between replicas of one version."""
        return await self._connection.live.client.checksums()

    async def unequal(self, snapshot: Any) -> list[str]:
        """Tensors of the server that have other changes than the snapshot, since the last proof."""
        client, version = self._connection.live.client, snapshot.header.version
        return await self._proof.unequal(
            client, snapshot, loaded=lambda: self._gate.version == version
        )

    def status(self) -> EngineStatus:
        """Current counters; version -1 while requests are refused."""
        self._account_time()
        return EngineStatus(
            engine="sglang",
            precision=self._dtype,
            version=self._gate.version,
            running=len(self._running),
            waiting=len(self._queue),
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
        self._unavailable = "the engine is closing"
        for server_request in [*self._running.values(), *self._queue.clear()]:
            self._running.pop(server_request.request_id, None)
            self._put(answers.closing(server_request.request_id, FinishReason.ABORT))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for swap in (self._swap, self._gate.pending):
            if swap is not None and not swap.done.done():
                swap.fail(UnavailableError(self._unavailable))
        self._gate.pending = self._swap = None
        await self._connection.drop()
        await self._connection.server.stop()
        self._output_queue.close()

    # requests -------------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Start the pending swap if it is due, otherwise the requests that may start."""
        session = self._connection.session
        if self._swap is not None or session is None:
            return
        if self._swap_due():
            self._account_time()
            self._swap = self._gate.pending
            self._spawn(self._exchange(), "swap")
            return
        free = self._max_concurrent - len(self._running)
        for server_request in list(islice(self._queue.startable(), max(free, 0))):
            self._queue.pop(server_request.request_id)
            self._send(server_request, session.client)

    def _send(self, server_request: ServerRequest, client: SglangClient) -> None:
        self._account_time()
        server_request.rid, server_request.version = self._next_rid(), self._gate.version
        server_request.seen, server_request.runs = 0, []
        if not self._running:
            self._last_event_at = self._clock()
        self._running[server_request.request_id] = server_request
        self._counts["prompt"] += len(server_request.request.tokens) + len(server_request.tokens)
        server_request.task = self._spawn(self._generate(server_request, client), "generate")

    async def _generate(self, server_request: ServerRequest, client: SglangClient) -> None:
        """Call the server for a request and emit what it streams."""
        end: Mapping[str, Any] = {}
        error = UnavailableError("the SGLang server ended the answer without a finish reason")
        try:
            body = answers.body_of(server_request, deterministic=self._deterministic)
            async with aclosing(client.stream(body)) as events:
                async for event in events:
                    end = self._handle_event(server_request, event)
                    if end.get("cut"):  # the server aborts a request whose stream is closed
                        break
        except PacelineError as failure:
            error = (
                failure
                if isinstance(failure, UnavailableError)
                else PacelineError(f"sglang: {failure}")
            )
        self._account_time()
        if self._running.pop(server_request.request_id, None) is not None:
            self._finish(server_request, end, error)
        self._schedule()

    def _handle_event(
        self, server_request: ServerRequest, event: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Emit the tokens of an event; returns its finish reason, empty if there is none."""
        self._last_event_at = self._clock()
        end: Mapping[str, Any] = event["meta_info"].get("finish_reason") or {}
        if end:
            self._counts["cached"] += int(event["meta_info"].get("cached_tokens") or 0)
        if end and (problem := answers.num_mislabelled(server_request, event)):
            log.warning("token versions corrected too late", job=self._job_id, tokens=problem)
        if answers.stale_start(server_request, event):
            return {"type": "stale", "cut": True}
        output = answers.take(server_request, event)
        if output is None:
            return end
        if self._decode is not None and server_request.request.sampling.stop_strings:
            output, match = answers.cut_at_stop(server_request, output, self._decode)
            end = {"type": "stop", "matched": match, "cut": True} if match else end
        self._counts["tokens"] += len(output.tokens)
        self._put(output)
        return end

    def _finish(
        self, server_request: ServerRequest, end: Mapping[str, Any], error: PacelineError
    ) -> None:
        reason, matched = answers.verdict(server_request, end)
        if reason is None:
            server_request.interrupted = False
            self._queue.add(server_request, first=True)
        elif reason is FinishReason.ERROR:
            text = str(end.get("message") or error)
            code = "UNAVAILABLE" if isinstance(error, UnavailableError) else "INTERNAL"
            self._put(error_output(server_request.request_id, code, text))
        else:
            self._put(answers.closing(server_request.request_id, reason, matched))

    async def _abort(self, server_request: ServerRequest) -> None:
        """Retry until the answer ends: a call that has not arrived yet cannot be aborted."""
        task, session = server_request.task, self._connection.session
        while task is not None and session is not None and not task.done():
            try:
                await session.client.abort(server_request.rid)
            except PacelineError as error:
                log.info("abort failed", error=error)
            await asyncio.wait({task}, timeout=ABORT_RETRY_S)

    # swapping -------------------------------------------------------------------------------

    def _swap_due(self) -> bool:
        pinned = sum(
            server_request.request.pinned_version >= 0 for server_request in self._running.values()
        )
        return self._gate.due(running=len(self._running), pinned=pinned + self._queue.num_pinned)

    async def _exchange(self) -> None:
        swap = self._swap
        assert swap is not None
        try:
            await self._replace(swap, self._connection.live)
        except PacelineError as error:
            log.error("weights not loaded", job=self._job_id, version=swap.version, error=error)
            self._set_unavailable(f"version {swap.version} could not be loaded: {error}")
            if self._gate.pending is swap:
                self._gate.finish(error)
        else:
            self._on_loaded(swap)
        self._account_time()
        self._swap = None
        self._schedule()

    async def _replace(self, swap: Swap, session: ServerSession) -> None:
        client, spans = session.client, session.capabilities.spans
        keeps_cache = swap.activation is Activation.IN_FLIGHT and spans and bool(self._running)
        try:
            if spans:
                await client.pause("in_place" if keeps_cache else "retract")
                # The scheduler answers after it has sent all tokens from before the pause.
                await client.server_info()
            else:
                await self._interrupt(client)
            # A cache in use cannot be flushed; new requests do not share it in any case.
            await session.loader.load(swap.snapshot, flush=not keeps_cache)
        finally:
            await client.resume()

    async def _interrupt(self, client: SglangClient) -> None:
        """Abort running requests on a server that does not report which version made a token."""
        tasks = [
            server_request.task
            for server_request in self._running.values()
            if server_request.task is not None
        ]
        for server_request in self._running.values():
            server_request.interrupted = True
        await client.pause("abort")
        if tasks:
            await asyncio.wait(tasks, timeout=INTERRUPT_TIMEOUT_S)

    def _on_loaded(self, swap: Swap) -> None:
        """Activate a version that the server has loaded, whatever was proposed meanwhile."""
        self._snapshot, self._unavailable = swap.snapshot, ""
        if self._gate.pending is swap:
            self._gate.finish()
        else:
            self._gate.version = swap.version
            newer = self._gate.pending
            if newer is not None and newer.version < swap.version:
                self._gate.finish(StateError(f"version {swap.version} is active"))
        for server_request in self._queue.swapped():
            self._put(version_gone(server_request.request, self._gate.version))

    # the server -----------------------------------------------------------------------------

    async def _supervise(self) -> None:
        while True:
            reason = await self._connection.server.died()
            log.error("server died", job=self._job_id, reason=reason)
            self._set_unavailable(reason)
            await self._connection.drop()
            await self._connection.reopen()
            self._schedule()
            self._spawn(self._restore(), "restore")

    async def _watch(self) -> None:
        """Stop a server that is alive but has sent nothing for `stall_s` despite requests."""
        while True:
            await asyncio.sleep(self._stall_s / 8)
            if not self._running or self._swap is not None:
                self._last_event_at = self._clock()
            elif self._clock() - self._last_event_at > self._stall_s:
                log.error("server stalled", job=self._job_id, seconds=self._stall_s)
                self._last_event_at = self._clock()
                await self._connection.server.stop()

    async def _restore(self) -> None:
        """Load the last snapshot into a new server, unless a newer one is on its way."""
        attempt = 0
        while self._gate.version < 0 and self._gate.pending is None and self._snapshot is not None:
            swap = Swap(self._snapshot, Activation.IN_FLIGHT)
            self._gate.propose(swap)
            self._schedule()
            try:
                await asyncio.wrap_future(swap.done)
            except PacelineError as error:
                log.warning(
                    "weights not restored", job=self._job_id, version=swap.version, error=error
                )
                await asyncio.sleep(retry_delay_s(attempt))
                attempt += 1

    def _set_unavailable(self, reason: str) -> None:
        """Refuse all requests; callers keep the tokens they have and use another worker."""
        self._account_time()
        self._unavailable = f"{reason}; resume on another worker"
        self._gate.version = -1
        for server_request in [*self._running.values(), *self._queue.clear()]:
            self._running.pop(server_request.request_id, None)
            self._put(error_output(server_request.request_id, "UNAVAILABLE", self._unavailable))
            if server_request.task is not None:
                server_request.task.cancel()

    # helpers --------------------------------------------------------------------------------

    def _put(self, output: EngineOutput) -> None:
        self._output_queue.put([output])

    def _next_rid(self) -> str:
        """A new request id; all have the same length, as SGLang aborts by prefix."""
        self._calls += 1
        return f"{self._prefix}{self._calls:012x}"

    def _account_time(self) -> None:
        """Account for the time since the last change."""
        now = self._clock()
        kind = "swap" if self._swap is not None else "busy" if self._running else "idle"
        self._seconds[kind] += now - self._updated_at
        self._updated_at = now

    def _spawn(self, work: Any, name: str) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the engine failed", task=task.get_name(), error=task.exception())
            self._output_queue.close()
