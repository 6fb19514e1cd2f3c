"""The tokenizers of jobs: in processes of the jobs, or in that of the service."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol, cast

from paceline.config.tokenizers import TokenizerSettings
from paceline.errors import InvalidError, PacelineError, UnavailableError
from paceline.isolation.code.sealed import sandbox_for
from paceline.isolation.code.tokenizers.frames import Answer, Call, ShowCall, Shown, TextCall
from paceline.isolation.code.tokenizers.process import MODULE, TokenProcess, TokenProcessError
from paceline.platform.telemetry.logs import Log
from paceline.platform.transport.linger import Linger, at_once
from paceline.tokens.chat import Tokenizer
from paceline.tokens.dialogue import render_step
from paceline.tokens.steps import DialogueStep

MAX_CALLS, MAX_REQUEST_BYTES = 512, 512 << 10  # of one request
IDLE_S = 300.0
MAX_ENDS = 3  # calls in a row that have ended their process; then no more is started
log = Log("tokenizers")
Files = Callable[[], Awaitable[Mapping[str, bytes]]]


class JobTokenizer(Protocol):
    """What a service asks of the tokenizer and the chat template of a job."""

    @property
    def eos(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        ...

    async def show(self, step: DialogueStep) -> Shown:
        """Tokens of an observation, as `render_step` has them.

        Raises:
            InvalidError: the tokenizer or the template refuses it, or takes too much for it.
            PacelineError: the process cannot be had, or has ended meanwhile.
        """
        ...

    async def turn_text(self, tokens: Sequence[int], *, keep_special: bool) -> str:
        """The text of a sampled turn, as `Tokenizer.turn_text` has it; raises as `show`."""
        ...


class Tokenizers(Protocol):
    """Finds the tokenizers of jobs."""

    async def of(self, job_id: str, files: Files) -> JobTokenizer:
        """That of a job, whose model has these files.

        Raises:
            InvalidError: they cannot be read, or only with too much time or memory.
            PacelineError: they cannot be fetched.
        """
        ...

    @property
    def jobs(self) -> set[str]:
        """Jobs for which something is kept."""
        ...

    async def end(self, job_id: str) -> None:
        """A job is over."""
        ...

    async def close(self) -> None:
        """End what they run in."""
        ...


@contextmanager
def _panics() -> Generator[None]:
    """Turn a panic of the tokenizer, which is no `Exception`, into what its job can be told."""
    try:
        yield
    except BaseException as error:  # the supervisor boundary of a tokenizer written in Rust
        if type(error).__name__ != "PanicException":
            raise
        raise InvalidError(f"model.path: tokenizer.json: {error}") from None


class LocalTokenizer:
    """A `JobTokenizer` in this process; nothing that it does is bounded, and it never waits."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def eos(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        return self._tokenizer.eos

    async def show(self, step: DialogueStep) -> Shown:
        """As `JobTokenizer` has it."""
        with _panics():
            return render_step(self._tokenizer, step)

    async def turn_text(self, tokens: Sequence[int], *, keep_special: bool) -> str:
        """As `JobTokenizer` has it."""
        with _panics():
            return self._tokenizer.turn_text(tokens, keep_special=keep_special)


class LocalTokenizers:
    """`Tokenizers` in this process."""

    async def of(self, job_id: str, files: Files) -> JobTokenizer:
        """As `Tokenizers` has it."""
        with _panics():
            return LocalTokenizer(await asyncio.to_thread(Tokenizer.from_files, await files()))

    @property
    def jobs(self) -> set[str]:
        """None: whoever has a tokenizer keeps it."""
        return set()

    async def end(self, job_id: str) -> None:
        """Nothing is to end."""

    async def close(self) -> None:
        """Nothing is to end."""


class ProcessTokenizers:
    """`Tokenizers` in a process for each job."""

    def __init__(self, settings: TokenizerSettings, *, linger: Linger = at_once) -> None:
        """Calls wait for others as long as `linger` says."""
        self._sandbox = sandbox_for(MODULE)
        self._settings = settings
        self._linger = linger
        self._jobs: dict[str, ProcessTokenizer] = {}

    async def of(self, job_id: str, files: Files) -> JobTokenizer:
        """As `Tokenizers` has it."""
        found = self._jobs.get(job_id)
        if found is None:

            async def start() -> TokenProcess:
                return await TokenProcess.start(
                    await files(), sandbox=self._sandbox, settings=self._settings
                )

            found = self._jobs[job_id] = ProcessTokenizer(start, linger=self._linger)
        await found.load()
        return found

    @property
    def jobs(self) -> set[str]:
        """Jobs that have asked for theirs."""
        return set(self._jobs)

    async def end(self, job_id: str) -> None:
        """A job is over: its process is killed at once."""
        if (found := self._jobs.pop(job_id, None)) is not None:
            await found.close("the job is over")

    async def close(self) -> None:
        """Kill all processes."""
        for job_id in list(self._jobs):
            await self.end(job_id)
        await self._sandbox.close()


@dataclass(slots=True, eq=False)
class _Waiting:
    """A call that waits for its answer; `call` is None if the process need only be there."""

    call: Call | None
    answer: asyncio.Future[Answer] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def settle(self, answer: Answer | PacelineError) -> None:
        if self.answer.done():  # its episode was aborted
            return
        if isinstance(answer, PacelineError):
            self.answer.set_exception(answer)
            self.answer.exception()  # nobody may be waiting for it
        else:
            self.answer.set_result(answer)


class ProcessTokenizer:
    """A `JobTokenizer` in a process of its job.

    One task sends what has come together since the last request. Of a request that has ended the
    process, or was not answered in time, the calls that were left are made again, each alone: so
    the culprit is found, and the others only wait.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[TokenProcess]],
        *,
        linger: Linger = at_once,
    ) -> None:
        self.eos: tuple[int, ...] = ()
        self._start = start
        self._linger = linger
        self._queue: deque[_Waiting] = deque()
        self._wake = asyncio.Event()
        self._process: TokenProcess | None = None
        self._ends = 0  # calls in a row that have ended their process
        self._refusal: InvalidError | UnavailableError | None = None  # of all further calls
        self._running = asyncio.create_task(self._run(), name="tokenizer")

    async def load(self) -> None:
        """Start a process, unless there is one; raises as `Tokenizers.of`."""
        await self._ask(None)

    async def show(self, step: DialogueStep) -> Shown:
        """As `JobTokenizer` has it."""
        return cast("Shown", await self._ask(ShowCall(step)))

    async def turn_text(self, tokens: Sequence[int], *, keep_special: bool) -> str:
        """As `JobTokenizer` has it."""
        return cast("str", await self._ask(TextCall(tokens, keep_special)))

    async def close(self, why: str) -> None:
        """Kill the process; calls in progress fail, and all later ones."""
        self._refusal = UnavailableError(f"model.path: tokenizer.json: {why}")
        self._running.cancel()
        with suppress(asyncio.CancelledError):
            await self._running
        await self._end()
        while self._queue:
            self._queue.popleft().settle(self._refusal)

    async def _ask(self, call: Call | None) -> Answer:
        self._check()
        waiting = _Waiting(call)
        self._queue.append(waiting)
        self._wake.set()
        answer = await waiting.answer
        if call is not None and isinstance(answer, str) is isinstance(call, ShowCall):
            raise InvalidError("model.path: tokenizer.json: its process gave a wrong answer")
        return answer

    def _check(self) -> None:
        if self._refusal is not None:  # raised itself, it would gather tracebacks
            raise type(self._refusal)(self._refusal.message)

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(IDLE_S if self._process is not None else None):
                    await self._wake.wait()
            except TimeoutError:
                await self._end()
                continue
            if (pause_s := self._linger()) > 0:
                await asyncio.sleep(pause_s)
            self._wake.clear()
            while self._queue:
                await self._serve(self._take())

    def _take(self) -> list[_Waiting]:
        taken, size = list[_Waiting](), 0
        while self._queue and len(taken) < MAX_CALLS and size < MAX_REQUEST_BYTES:
            found = self._queue.popleft()
            if not found.answer.done():
                taken.append(found)
                size += found.call.size if found.call is not None else 0
        return taken

    async def _serve(self, taken: list[_Waiting]) -> None:
        """Answer calls, whatever happens."""
        try:
            left = await self._attempt(taken, tell=False)
            for each in left:
                if not each.answer.done():
                    await self._attempt([each], tell=True)
        except PacelineError as error:
            for each in taken:
                each.settle(error)
        except asyncio.CancelledError:
            for each in taken:
                each.settle(self._refusal or UnavailableError("the worker ends"))
            raise
        except Exception as error:  # the supervisor boundary of this task: calls get an answer
            log.exception("tokenizer failed")
            await self._end()
            for each in taken:
                each.settle(UnavailableError(f"tokenizer: {type(error).__name__}: {error}"))

    async def _attempt(self, taken: list[_Waiting], *, tell: bool) -> list[_Waiting]:
        """Ask the process; returns calls to be made again. With `tell` there is only one."""
        self._check()
        if self._process is None:
            await self._begin()
        assert self._process is not None
        left = deque[_Waiting]()
        for each in taken:
            if each.call is None:
                each.settle("")
            else:
                left.append(each)
        calls = [each.call for each in left if each.call is not None]
        if not calls:
            return []
        try:
            async with aclosing(self._process.ask(calls, tell=tell)) as answers:
                async for answer in answers:
                    left.popleft().settle(answer)
                    self._ends = 0
        except TokenProcessError as error:
            await self._end()
            if tell:
                self._blame(left.popleft(), error)
        return list(left)

    def _blame(self, culprit: _Waiting, error: TokenProcessError) -> None:
        log.warning("tokenizer killed", why=error)
        found = InvalidError(error.message)
        culprit.settle(found)
        self._ends += 1
        if self._ends >= MAX_ENDS:
            self._refusal = found

    async def _begin(self) -> None:
        try:
            self._process = await self._start()
        except InvalidError as error:  # the files are the same for another attempt
            self._refusal = InvalidError(error.message)
            raise
        self.eos = self._process.eos

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.kill()


def tokenizers_of(settings: TokenizerSettings, *, linger: Linger = at_once) -> Tokenizers:
    """Tokenizers where the operator wants them."""
    if settings.run_in == "in_process":
        return LocalTokenizers()
    return ProcessTokenizers(settings, linger=linger)
