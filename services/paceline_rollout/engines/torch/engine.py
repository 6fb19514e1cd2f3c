"""The engine's event-loop side, and the thread that computes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.errors import InvalidError, PacelineError, UnavailableError
from paceline.interfaces import Emission, EngineStatus, Generation
from paceline.logs import Log
from paceline_rollout.activation import Swap, parse_activation
from paceline_rollout.engines.base import Outbox, decoder
from paceline_rollout.engines.torch.model import Policy
from paceline_rollout.engines.torch.scheduler import Scheduler
from paceline_rollout.engines.torch.weights import DTYPES, Weights

Command = Callable[[], None]
log = Log("engine")


class TorchEngine:
    """Any Hugging Face causal LM; all computing happens in one thread of its own."""

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
        device: str = "cpu",
        flush_s: float = 0.25,
        prefill_tokens: int = 512,
        cache_bytes: int = 2 << 30,
        least_shared: int = 128,
        packed: bool = True,
    ) -> None:
        """Nothing is built before `start`.

        `prefill_tokens` are computed at most between two decode steps. Prompts of `least_shared`
        tokens or more are kept once for all who begin with them, shorter ones are copied; 0: each
        request computes its own. `cache_bytes` bounds all keys and values, but for a single
        request that needs more. `packed` keeps large layers a second time, as the CPU likes them.
        """
        for name, value, least in (
            ("prefill_tokens", prefill_tokens, 1),
            ("least_shared", least_shared, 0),
        ):
            if value < least:
                raise InvalidError(f"rollout.{name}: {value}; allowed: {least} or more")
        if model_dir is None:
            raise InvalidError("rollout.engine: torch needs a model folder")
        if dtype not in DTYPES:
            raise InvalidError(f"model.dtype: {dtype!r}; allowed: {', '.join(DTYPES)}")
        self._model_dir = model_dir
        self._tokenizer_dir = tokenizer_dir
        self._dtype = dtype
        self._device = device
        self._max_context = max_context
        self._max_concurrent = max_concurrent
        self._threads = threads
        self._job_id = job_id
        self._flush_s = flush_s
        self._prefill_tokens = prefill_tokens
        self._cache_bytes = cache_bytes
        self._least_shared = least_shared
        self._packed = packed
        self._commands: deque[Command] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        # One thread of torch: the others are for computing.
        self._loader = ThreadPoolExecutor(1, "loader", torch.set_num_threads, (1,))
        self._scheduler: Scheduler | None = None
        self._seconds = {"busy": 0.0, "idle": 0.0, "swap": 0.0}
        self._idle_since = 0.0
        self._flushed = 0.0
        self._outbox = Outbox()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Build the model without weights; requests wait for the first `load`."""
        self._loop = asyncio.get_running_loop()
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="engine", daemon=True)
        self._thread.start()
        await asyncio.wrap_future(ready)

    def submit(self, batch: Sequence[Generation]) -> None:
        """Queue requests."""
        self._order(partial(self._made.add, list(batch)))

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; unknown ids are ignored."""
        self._order(partial(self._made.abort, list(request_ids)))

    def emissions(self) -> AsyncIterator[list[Emission]]:
        """Everything that comes out, in batches."""
        return self._outbox.batches()

    async def load(self, snapshot: Any, activation: str) -> None:
        """Swap weights when the activation allows it; returns when it is done.

        Raises:
            StateError: a newer version displaced this one, or is active.
            InvalidError: the snapshot does not fit the model; the old version stays.
        """
        swap = Swap(snapshot, parse_activation(activation))
        self._order(partial(self._made.expect, swap))
        self._loader.submit(self._prepare, swap)
        await asyncio.wrap_future(swap.done)

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of tokens[1:] at temperature 1 under the active version."""
        done: Future[list[float]] = Future()
        done.set_running_or_notify_cancel()
        self._order(partial(_settle, done, partial(self._made.score, tuple(tokens))))
        return await asyncio.wrap_future(done)

    def status(self) -> EngineStatus:
        """Counters now."""
        made, since = self._made, self._idle_since
        idle_s = self._seconds["idle"] + (time.monotonic() - since if since else 0.0)
        return EngineStatus(
            engine="torch",
            precision=self._dtype,
            version=made.gate.version,
            running=made.num_running,
            waiting=made.num_waiting,
            tokens_generated=made.tokens_generated,
            prompt_tokens=made.prompt_tokens,
            max_context=self._max_context,
            vocab_size=made.limits.vocab_size,
            busy_s=self._seconds["busy"],
            idle_s=idle_s,
            swap_s=self._seconds["swap"],
            cached_tokens=made.adopted_tokens,
            kv_ratio=made.kv_ratio,
        )

    async def close(self) -> None:
        """Abort everything and end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._loader.shutdown)

    @property
    def _made(self) -> Scheduler:
        if self._scheduler is None:
            raise UnavailableError("the engine has not started")
        return self._scheduler

    def _order(self, command: Command) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    # in the thread that prepares ------------------------------------------------------------

    def _prepare(self, swap: Swap) -> None:
        """Make new weights while the old ones serve; an error leaves these as they are."""
        if swap.done.done():
            return  # displaced
        made = self._made
        try:
            weights = made.prepare(swap.snapshot)
        except PacelineError as error:
            self._order(partial(made.give_up, swap, error))
            return
        except Exception:  # the boundary of one swap: whatever it was, the engine goes on
            log.exception("cannot prepare", job=self._job_id, version=swap.version)
            error = PacelineError("the engine failed; see the log of the rollout worker")
            self._order(partial(made.give_up, swap, error))
            return
        self._order(partial(made.prepared, swap, weights))
        swap.done.add_done_callback(lambda _: self._release(weights))

    def _release(self, weights: Weights) -> None:
        """Let go of what was replaced or displaced, which takes longer than the swap."""
        with suppress(RuntimeError):  # closed: all of it goes
            self._loader.submit(weights.clear)

    # in the thread that computes ------------------------------------------------------------

    @torch.inference_mode()
    def _run(self, ready: Future[None]) -> None:
        # The number of threads is a property of the thread that computes.
        torch.set_num_threads(self._threads)
        try:
            self._scheduler = scheduler = self._build()
        except BaseException as error:  # the boundary of the thread: `start` raises it
            ready.set_exception(error)
            return
        ready.set_result(None)
        try:
            while (commands := self._take(scheduler)) is not None:
                started, swapped_s = time.monotonic(), self._seconds["swap"]
                self._round(scheduler, commands)
                self._deliver(scheduler)
                swap_s = self._seconds["swap"] - swapped_s
                self._seconds["busy"] += time.monotonic() - started - swap_s
            self._end(scheduler)
        finally:
            # Whatever ends the thread, the consumer of emissions learns of it.
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._outbox.close)

    def _round(self, scheduler: Scheduler, commands: list[Command]) -> None:
        try:
            for command in commands:
                command()
            started = time.monotonic()
            if scheduler.swap():
                self._seconds["swap"] += time.monotonic() - started
            scheduler.tick()
            if time.monotonic() - self._flushed >= self._flush_s:
                self._flushed = time.monotonic()
                scheduler.flush()
        except Exception:  # the boundary of one round: whatever it was, the engine goes on
            log.exception("round failed", job=self._job_id)
            scheduler.fail("the engine failed; see the log of the rollout worker")

    def _take(self, scheduler: Scheduler) -> list[Command] | None:
        """New commands; waits for some when there is nothing to compute. None: the end."""
        with self._wake:
            if not self._commands and not self._closing and not scheduler.busy:
                self._idle_since = time.monotonic()
                self._wake.wait()
                self._seconds["idle"] += time.monotonic() - self._idle_since
                self._idle_since = 0.0
            if self._closing:
                return None
            taken = list(self._commands)
            self._commands.clear()
        return taken

    def _deliver(self, scheduler: Scheduler) -> None:
        if scheduler.out and self._loop is not None:
            batch, scheduler.out = scheduler.out, []
            self._loop.call_soon_threadsafe(self._outbox.put, batch)

    def _end(self, scheduler: Scheduler) -> None:
        with self._wake:
            left = list(self._commands)
            self._commands.clear()
        for command in left:
            command()
        scheduler.gate.close(UnavailableError("the engine is closing"))
        scheduler.abort_all()
        self._deliver(scheduler)

    def _build(self) -> Scheduler:
        policy = Policy(
            model_dir=self._model_dir,
            dtype=self._dtype,
            max_context=self._max_context,
            device=self._device,
            packed=self._packed,
        )
        return Scheduler(
            policy=policy,
            max_context=self._max_context,
            max_concurrent=self._max_concurrent,
            prefill_tokens=self._prefill_tokens,
            cache_bytes=self._cache_bytes,
            least_shared=self._least_shared,
            decode=decoder(self._tokenizer_dir),
        )


def _settle(done: Future[list[float]], compute: Callable[[], list[float]]) -> None:
    try:
        done.set_result(compute())
    except Exception as error:  # the boundary of one command: its awaiter raises it
        done.set_exception(error)
