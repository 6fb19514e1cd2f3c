"""One process with the tokenizer of a job, and the calls that it is given."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress

from paceline.code.folders import CodeFolder
from paceline.code.frames import HEAD, FrameError, frame
from paceline.code.open_process import OpenProcess
from paceline.code.sealed import OWN, start_sealed
from paceline.code.tokenizers.frames import (
    Answer,
    Call,
    Told,
    read_answers,
    read_eos,
    read_head,
    to_json,
    told,
)
from paceline.code.world_process import FramedProcess
from paceline.config.tokenizers import TokenizerSettings
from paceline.errors import InvalidError, PacelineError, UnavailableError
from paceline.sandbox.sandbox import Sandbox
from paceline.telemetry.logs import Log
from paceline.tokens.chat import TOKENIZER

MODULE = "paceline.code.tokenizers.child"
_END_S = 5.0
log = Log("tokenizers")


class TokenProcessError(PacelineError):
    """A process has not answered: it took too long, or has ended."""


class TokenProcess:
    """A process that answers one request at a time."""

    def __init__(self, process: FramedProcess, settings: TokenizerSettings) -> None:
        self._process = process
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
        sizes = json.dumps({name: len(data) for name, data in files.items()}).encode()
        self._part = TOKENIZER
        self._process.write(b"".join((HEAD.pack(len(sizes)), sizes, *files.values())))
        try:
            async with asyncio.timeout(self._settings.load_s):
                while "at" in (head := (await read_head(self._process.stdout))[0]):
                    self._part = told(head)
            self.eos = read_eos(head)
        except TimeoutError:
            why = f"reading it takes more than {self._settings.load_s:g} s"
            raise InvalidError(self._blamed(why).message) from None
        except FrameError as error:
            why = f"reading it ends its process: {await self._ended(error)}"
            raise InvalidError(self._blamed(why).message) from None

    async def ask(self, calls: Sequence[Call], *, tell: bool) -> AsyncGenerator[Answer]:
        """Answers in the order of the calls, as they come. After an error it must be killed.

        `tell`: so that an error names the part of the tokenizer that was at work.

        Raises:
            TokenProcessError: it takes too long for a call, or ends.
        """
        self._process.write(frame({"calls": [to_json(call) for call in calls], "tell": tell}))
        self._part, left = "", len(calls)
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._settings.timeout_s
        try:
            while left:
                async with asyncio.timeout_at(due_s):
                    found = await read_answers(self._process.stdout)
                if isinstance(found, Told):
                    self._part = found.part
                    continue
                if not 0 < len(found) <= left:
                    raise FrameError("answered what nobody has asked")
                left -= len(found)
                for answer in found:
                    yield answer
                due_s = loop.time() + self._settings.timeout_s
        except TimeoutError:
            raise self._blamed(f"takes more than {self._settings.timeout_s:g} s") from None
        except FrameError as error:
            raise self._blamed(f"ends its process: {await self._ended(error)}") from None

    async def kill(self) -> None:
        """End it at once."""
        await self._process.kill()

    def _blamed(self, why: str) -> TokenProcessError:
        part = self._part or "tokenizer.json or chat template"
        return TokenProcessError(f"model.path: {part}: {why}")

    async def _ended(self, error: FrameError) -> str:
        await self._process.kill()
        why = error.message
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                why = f"{why} ({await self._process.exit_text()})"
        return why


async def _process(sandbox: Sandbox, memory_bytes: int) -> FramedProcess:
    try:
        await sandbox.level()
    except UnavailableError as error:
        log.warning("tokenizers run in processes that are not sealed", why=error)
        return await OpenProcess.start(MODULE, memory_bytes)
    return await start_sealed(sandbox, CodeFolder(OWN), MODULE, 0, memory_bytes=memory_bytes)
