"""The torch engine: its interface on the event loop, and the thread that computes."""

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
from typing import Any, TypeVar

import torch

from paceline.errors import InvalidError, PacelineError, UnavailableError
from paceline.platform.free_memory import return_free_memory
from paceline.platform.telemetry.logs import Log
from paceline.plugins import EngineOutput, EngineRequest, EngineStatus
from paceline_rollout.activation import Swap, parse_activation
from paceline_rollout.engines.base import OutputQueue, decoder
from paceline_rollout.engines.torch.forward import device_of
from paceline_rollout.engines.torch.model import TorchModel
from paceline_rollout.engines.torch.scheduler import Scheduler
from paceline_rollout.engines.torch.weights import DTYPES, Weights

Command = Callable[[], None]
Result = TypeVar("Result")
log = Log("engine")


class TorchEngine:
    """Any Hugging Face causal LM; all computation runs in one separate thread."""

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
        device: str = "auto",
        flush_s: float = 0.25,
        prefill_tokens: int = 512,
        cache_bytes: int = 2 << 30,
        least_shared: int = 128,
        packed: bool = True,
    ) -> None:
        """The model is only built by `start`.

        At most `prefill_tokens` are computed between two decode steps. Prompts of `least_shared`
        tokens or more are kept once and shared by all requests that begin with them, shorter ones
        are copied; 0: each request computes its own. `cache_bytes` bounds all keys and values,
        unless a single request needs more. `packed` keeps a second copy of large layers in the
        layout that CPUs read fastest. `device`: `auto` is the GPU that this process sees, or the
        CPU.
        """
        for name, value, minimum in (
            ("prefill_tokens", prefill_tokens, 1),
            ("least_shared", least_shared, 0),
        ):
            if value < minimum:
                raise InvalidError(f"rollout.{name}: {value}; allowed: {minimum} or more")
        if model_dir is None:
            raise InvalidError("rollout.engine: torch needs a model folder")
        if dtype not in DTYPES:
            raise InvalidError(f"model.dtype: {dtype!r}; allowed: {', '.join(DTYPES)}")
        self._model_dir = model_dir
        self._tokenizer_dir = tokenizer_dir
        self._dtype = dtype
        self._device = device_of(device)
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
        # Torch may use one thread for loading; the others compute.
        self._loader = ThreadPoolExecutor(1, "loader", torch.set_num_threads, (1,))
        self._scheduler: Scheduler | None = None
        self._seconds = {"busy": 0.0, "idle": 0.0, "swap": 0.0}
        self._idle_since = 0.0
        self._flushed_at = 0.0
        self._output_queue = OutputQueue()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Build the model without weights; requests wait for the first `load`."""
        self._loop = asyncio.get_running_loop()
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="engine", daemon=True)
        self._thread.start()
        await asyncio.wrap_future(ready)

    def submit(self, batch: Sequence[EngineRequest]) -> None:
        """Queue requests."""
        self._enqueue(partial(self._started_scheduler.add, list(batch)))

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; unknown ids are ignored."""
        self._enqueue(partial(self._started_scheduler.abort, list(request_ids)))

    def emissions(self) -> AsyncIterator[list[EngineOutput]]:
        """All outputs, in batches."""
        return self._output_queue.batches()

    async def load(self, snapshot: Any, activation: str) -> None:
        """Swap weights as soon as the activation allows it; returns after the swap.

        Raises:
            StateError: a newer version displaced this one, or is active.
            InvalidError: the snapshot does not fit the model; the old version stays.
        """
        await self._load(Swap(snapshot, parse_activation(activation)))

    async def roll_back(self, snapshot: Any) -> None:
        """Swap to older weights; running requests are computed anew.

        Raises:
            StateError: a newer version is on its way.
        """
        await self._load(Swap.back_to(snapshot))

    async def _load(self, swap: Swap) -> None:
        self._enqueue(partial(self._started_scheduler.expect, swap))
        self._loader.submit(self._prepare, swap)
        await asyncio.wrap_future(swap.done)

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of tokens[1:] at temperature 1 under the active version."""
        return await self._computed(partial(self._started_scheduler.score, tuple(tokens)))

    async def unequal(self, snapshot: Any) -> list[str]:
        """The names of tensors whose bytes are not those of the snapshot."""
        return await self._computed(partial(self._started_scheduler.unequal, snapshot))

    def status(self) -> EngineStatus:
        """Current counters."""
        scheduler, since = self._started_scheduler, self._idle_since
        idle_s = self._seconds["idle"] + (time.monotonic() - since if since else 0.0)
        return EngineStatus(
            engine="torch",
            precision=self._dtype,
            version=scheduler.gate.version,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            tokens_generated=scheduler.tokens_generated,
            prompt_tokens=scheduler.prompt_tokens,
            max_context=self._max_context,
            vocab_size=scheduler.limits.vocab_size,
            busy_s=self._seconds["busy"],
            idle_s=idle_s,
            swap_s=self._seconds["swap"],
            cached_tokens=scheduler.adopted_tokens,
            kv_ratio=scheduler.kv_ratio,
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
    def _started_scheduler(self) -> Scheduler:
        if self._scheduler is None:
            raise UnavailableError("the engine has not started")
        return self._scheduler

    async def _computed(self, compute: Callable[[], Result]) -> Result:
        """The result of work in the thread that computes; raises what it raises."""
        done: Future[Result] = Future()
        done.set_running_or_notify_cancel()
        self._enqueue(partial(_set_result, done, compute))
        return await asyncio.wrap_future(done)

    def _enqueue(self, command: Command) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    # in the thread that prepares ------------------------------------------------------------

    def _prepare(self, swap: Swap) -> None:
        """Prepare new weights while the old ones serve; after an error these continue to."""
        if swap.done.done():
            return  # displaced
        scheduler = self._started_scheduler
        try:
            weights = scheduler.prepare(swap.snapshot)
        except PacelineError as error:
            self._enqueue(partial(scheduler.give_up, swap, error))
            return
        except Exception:  # the supervisor boundary of one swap: the engine keeps running
            log.exception("cannot prepare", job=self._job_id, version=swap.version)
            error = PacelineError("the engine failed; see the log of the rollout worker")
            self._enqueue(partial(scheduler.give_up, swap, error))
            return
        self._enqueue(partial(scheduler.prepared, swap, weights))
        swap.done.add_done_callback(lambda _: self._release(weights))

    def _release(self, weights: Weights) -> None:
        """Free replaced or displaced weights in the loader thread, as that takes time."""

        def free() -> None:
            weights.clear()
            return_free_memory()

        with suppress(RuntimeError):  # the loader is shut down, and so is the engine
            self._loader.submit(free)

    # in the thread that computes ------------------------------------------------------------

    @torch.inference_mode()
    def _run(self, ready: Future[None]) -> None:
        # The number of threads is a property of the thread that computes.
        torch.set_num_threads(self._threads)
        try:
            self._scheduler = scheduler = self._build()
        except BaseException as error:  # the supervisor boundary of the thread: `start` raises it
            ready.set_exception(error)
            return
        ready.set_result(None)
        try:
            while (commands := self._next_commands(scheduler)) is not None:
                started, swapped_s = time.monotonic(), self._seconds["swap"]
                self._round(scheduler, commands)
                self._send_outputs(scheduler)
                swap_s = self._seconds["swap"] - swapped_s
                self._seconds["busy"] += time.monotonic() - started - swap_s
            self._shut_down(scheduler)
        finally:
            # However the thread ends, the consumer of outputs must not wait forever.
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._output_queue.close)

    def _round(self, scheduler: Scheduler, commands: list[Command]) -> None:
        try:
            for command in commands:
                command()
            started = time.monotonic()
            if scheduler.swap():
                self._seconds["swap"] += time.monotonic() - started
            scheduler.tick()
            if time.monotonic() - self._flushed_at >= self._flush_s:
                self._flushed_at = time.monotonic()
                scheduler.flush()
        except Exception:  # the supervisor boundary of one round: the engine keeps running
            log.exception("round failed", job=self._job_id)
            scheduler.fail("the engine failed; see the log of the rollout worker")

    def _next_commands(self, scheduler: Scheduler) -> list[Command] | None:
        """New commands; waits for some if there is nothing to compute. None: shut down."""
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

    def _send_outputs(self, scheduler: Scheduler) -> None:
        if scheduler.out and self._loop is not None:
            batch, scheduler.out = scheduler.out, []
            self._loop.call_soon_threadsafe(self._output_queue.put, batch)

    def _shut_down(self, scheduler: Scheduler) -> None:
        with self._wake:
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command()
        scheduler.gate.close(UnavailableError("the engine is closing"))
        scheduler.abort_all()
        self._send_outputs(scheduler)

    def _build(self) -> Scheduler:
        policy = TorchModel(
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


def _set_result(done: Future[Result], compute: Callable[[], Result]) -> None:
    try:
        done.set_result(compute())
    except Exception as error:  # the supervisor boundary of one command: its awaiter raises it
        done.set_exception(error)
