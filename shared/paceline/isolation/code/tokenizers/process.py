"""One process with the tokenizer of a job, and the calls that it is given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence

from paceline.config.tokenizers import TokenizerSettings
from paceline.errors import InvalidError, PacelineError, UnavailableError
from paceline.isolation.calls import CallError, Calls, EndedError
from paceline.isolation.code.folders import CodeFolder
from paceline.isolation.code.sealed import OWN, start_sealed
from paceline.isolation.code.tokenizers.frames import (
    MAX_ANSWER_BYTES,
    MAX_ERROR_CHARS,
    Answer,
    Call,
    Told,
    answers_of,
    read_eos,
    to_json,
    told,
)
from paceline.isolation.frames import FrameError
from paceline.isolation.process import ChildProcess, PlainProcess, open_command
from paceline.isolation.sandbox.sandbox import Sandbox
from paceline.platform.telemetry.logs import Log
from paceline.tokens.chat import TOKENIZER

MODULE = "paceline.isolation.code.tokenizers.child"
log = Log("tokenizers")


class TokenProcessError(PacelineError):
    """A process has not answered: it took too long, or has ended."""


class TokenProcess:
    """A process that answers one request at a time."""

    def __init__(self, process: ChildProcess, settings: TokenizerSettings) -> None:
        self._calls = Calls(process)
        self._settings = settings
        self._part = ""  # of the tokenizer, that is at work
        self.eos: tuple[int, ...] = ()

    @classmethod
    async def start(
        cls, files: Mapping[str, bytes], *, sandbox: Sandbox, settings: TokenizerSettings
    ) -> TokenProcess:
        """Start one with the small files of a model, by name.

        It is sealed where programs can be contained. Elsewhere it is bounded in time and memory all
        the same, which is what a template, confined by Jinja, could do harm with.

        Raises:
            InvalidError: the files cannot be read, or take too much time or memory.
        """
        made = cls(await _process(sandbox, settings.memory_bytes), settings)
        try:
            await made._load(files)
        except BaseException:
            await made.kill()
            raise
        return made

    async def _load(self, files: Mapping[str, bytes]) -> None:
        self._part = TOKENIZER
        try:
            async with (
                asyncio.timeout(self._settings.load_s),
                self._calls.stream("load", parts=files) as answers,
            ):
                while "at" in (head := (await answers.next()).fields):
                    self._part = told(head)
            self.eos = read_eos(head)
        except TimeoutError:
            why = f"reading it takes more than {self._settings.load_s:g} s"
            raise InvalidError(self._blamed(why).message) from None
        except CallError as error:
            raise InvalidError(error.message[:MAX_ERROR_CHARS]) from None
        except (EndedError, FrameError) as error:
            why = f"reading it ends its process: {error.message}"
            raise InvalidError(self._blamed(why).message) from None

    async def ask(self, calls: Sequence[Call], *, tell: bool) -> AsyncGenerator[Answer]:
        """Answers in the order of the calls, as they come. After an error it must be killed.

        `tell`: so that an error names the part of the tokenizer that was at work.

        Raises:
            TokenProcessError: it takes too long for a call, or ends.
        """
        asked = {"calls": [to_json(call) for call in calls], "tell": tell}
        self._part, left = "", len(calls)
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._settings.timeout_s
        try:
            async with self._calls.stream("answer", asked, most_bytes=MAX_ANSWER_BYTES) as answers:
                while left:
                    async with asyncio.timeout_at(due_s):
                        some = answers_of(await answers.next())
                    if isinstance(some, Told):
                        self._part = some.part
                        continue
                    if not 0 < len(some) <= left:
                        raise FrameError("answered what nobody has asked")
                    left -= len(some)
                    for answer in some:
                        yield answer
                    due_s = loop.time() + self._settings.timeout_s
        except TimeoutError:
            raise self._blamed(f"takes more than {self._settings.timeout_s:g} s") from None
        except (CallError, EndedError, FrameError) as error:
            raise self._blamed(f"ends its process: {error.message}") from None

    async def kill(self) -> None:
        """End it at once."""
        await self._calls.kill()

    def _blamed(self, why: str) -> TokenProcessError:
        part = self._part or "tokenizer.json or chat template"
        return TokenProcessError(f"model.path: {part}: {why}")


async def _process(sandbox: Sandbox, memory_bytes: int) -> ChildProcess:
    try:
        await sandbox.level()
    except UnavailableError as error:
        log.warning("tokenizers run in processes that are not sealed", why=error)
        return await PlainProcess.start(open_command(MODULE, memory_bytes))
    return await start_sealed(sandbox, CodeFolder(OWN), MODULE, 0, memory_bytes=memory_bytes)
