"""Tries the tokenizer and the chat template of a job before it is accepted."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace

from paceline.config.tokenizers import TokenizerSettings
from paceline.errors import BusyError, ConfigError, InvalidError
from paceline.isolation.code.tokenizers.frames import Call, ShowCall, Shown, TextCall
from paceline.isolation.code.tokenizers.jobs import JobTokenizer, LocalTokenizers
from paceline.isolation.code.tokenizers.process import TokenProcess, TokenProcessError
from paceline.isolation.sandbox.sandbox import Sandbox
from paceline.plugins import Message, Observation, Replies
from paceline.tokens.chat import RejectedMessagesError, Rendered, UnreadableTokenizerError
from paceline.tokens.dialogue import DialogueState
from paceline.tokens.steps import DialogueStep

_QUEUE_TIMEOUT_S = 20.0
_MAX_PROCESSES = 4
_MAX_KNOWN = 1024  # models
_WRONG = "model.path: tokenizer.json: its process gave a wrong answer"
_SYSTEM = Message("system", "Be brief.")
_GREETING = Observation(messages=(Message("user", "Hello"),), text="Hello")
# Errors of files with unexpected contents, wherever they are read or rendered.
_OF_FILES = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError)
_ADD = {
    "type": "function",
    "function": {"name": "add", "description": "The sum.", "parameters": {"type": "object"}},
}
# Messages that a dialogue is tried with, by who replies in it.
_OBSERVATIONS: Mapping[Replies, tuple[Observation, ...]] = {
    "none": (_GREETING,),
    "user": (
        _GREETING,
        Observation(messages=(Message("user", "Why?"),), text="Why?"),
        Observation(messages=(Message("user", "And then?"),), text="And then?"),
    ),
    "tools": (
        Observation(messages=_GREETING.messages, tools=(_ADD,)),
        Observation(messages=(Message("tool", "42", name="add"),)),
        Observation(messages=(Message("tool", "43", name="add"),)),
    ),
}


class ModelTrial:
    """Has processes with limits read the small files of models, each once."""

    def __init__(self, settings: TokenizerSettings, sandbox: Sandbox) -> None:
        self._settings = settings
        self._sandbox = sandbox
        self._processes = asyncio.Semaphore(_MAX_PROCESSES)
        self._tenants: dict[str, asyncio.Lock] = {}
        # Digests of models that are fine, with who replied in their dialogues.
        self._known: OrderedDict[tuple[str, Replies], None] = OrderedDict()

    async def check(
        self,
        files: Mapping[str, bytes],
        tenant: str,
        *,
        replies: Replies = "none",
        vocab_size: int | None = None,
    ) -> None:
        """Read the files as workers will, and render a dialogue in which `replies` answer.

        `vocab_size`: what their `config.json` says; None: nothing.

        Where tokenizers run in the process of the service, a tokenizer that cannot be read is left
        to workers, which refuse it.

        Raises:
            ConfigError: that fails, or takes too much time or memory.
            BusyError: too many models are being tried.
        """
        name = await asyncio.to_thread(_digest, files), replies
        if name in self._known:
            self._known.move_to_end(name)
            return
        if self._settings.run_in == "in_process":
            shown = await self._try_here(files, _OBSERVATIONS[replies])
        else:
            shown = await self._try_in_turn(files, tenant, _OBSERVATIONS[replies])
        if vocab_size is not None and shown >= vocab_size:
            raise ConfigError(
                f"model.path: the chat template shows the token {shown}, but config.json says "
                f"vocab_size {vocab_size}: it was added to the tokenizer alone; resize the "
                "embeddings of the model too (resize_token_embeddings)"
            )
        self._known[name] = None
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    async def _try_here(
        self, files: Mapping[str, bytes], observations: Sequence[Observation]
    ) -> int:
        """In a thread, which cannot be ended: those that hang keep their slots."""
        async with _queue():
            await self._processes.acquire()
        trial = asyncio.ensure_future(asyncio.to_thread(_play, files, observations))
        trial.add_done_callback(lambda _: self._processes.release())
        try:
            async with asyncio.timeout(self._settings.load_s):
                return await asyncio.shield(trial)
        except TimeoutError:
            raise ConfigError(
                "model.path: tokenizer and chat template take more than "
                f"{self._settings.load_s:g} s for a dialogue"
            ) from None

    async def _try_in_turn(
        self, files: Mapping[str, bytes], tenant: str, observations: Sequence[Observation]
    ) -> int:
        async with AsyncExitStack() as held:
            async with _queue():
                # One process per tenant, so that one tenant cannot take them all.
                await held.enter_async_context(self._tenants.setdefault(tenant, asyncio.Lock()))
                await held.enter_async_context(self._processes)
            return await self._try(files, observations)

    async def _try(self, files: Mapping[str, bytes], observations: Sequence[Observation]) -> int:
        try:
            process = await TokenProcess.start(
                files, sandbox=self._sandbox, settings=self._settings
            )
        except InvalidError as error:
            raise ConfigError(error.message) from None
        try:
            return await _hold_dialogue(_Asked(process), observations)
        except (InvalidError, TokenProcessError) as error:
            raise ConfigError(error.message) from None
        finally:
            await process.kill()


@asynccontextmanager
async def _queue() -> AsyncGenerator[None]:
    """Bounds what is awaited in it, a place among the models that are tried."""
    try:
        async with asyncio.timeout(_QUEUE_TIMEOUT_S):
            yield
    except TimeoutError:
        raise BusyError("model.path: many models are being tried; try again") from None


def _play(files: Mapping[str, bytes], observations: Sequence[Observation]) -> int:
    async def read() -> Mapping[str, bytes]:
        return files

    async def hold() -> int:
        try:
            tokenizer = await LocalTokenizers().of("", read)
        except UnreadableTokenizerError:
            return -1
        return await _hold_dialogue(tokenizer, observations)

    try:
        return asyncio.run(hold())
    except InvalidError as error:
        raise ConfigError(error.message) from None
    except _OF_FILES as error:
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"model.path: tokenizer or chat template: {what}") from error


class _Asked:
    """The `JobTokenizer` of a process that is asked one thing at a time."""

    def __init__(self, process: TokenProcess) -> None:
        self._process = process
        self.eos = process.eos

    async def show(self, step: DialogueStep) -> Shown:
        shown = await self._answer(ShowCall(step))
        if isinstance(shown, str):
            raise InvalidError(_WRONG)
        return shown

    async def turn_text(self, tokens: Sequence[int], *, keep_special: bool) -> str:
        text = await self._answer(TextCall(tokens, keep_special))
        if not isinstance(text, str):
            raise InvalidError(_WRONG)
        return text

    async def _answer(self, call: Call) -> Shown | str:
        async with aclosing(self._process.ask([call], tell=True)) as answers:
            answer = await anext(answers)
        if isinstance(answer, InvalidError):
            raise answer
        return answer


async def _hold_dialogue(tokenizer: JobTokenizer, observations: Sequence[Observation]) -> int:
    """Render messages in turns and decode the tokens; raises what goes wrong.

    Returns the highest token that is shown; -1: none.
    """
    state, rendered = await _begun(tokenizer, observations[0])
    await tokenizer.turn_text(rendered.tokens, keep_special=False)
    highest = max(rendered.tokens, default=-1)
    for observation in observations[1:]:
        state.turn(tokenizer.eos[:1])
        rendered, prefix = await tokenizer.show(state.observed(observation))
        state.shown(prefix)
        await tokenizer.turn_text(rendered.tokens, keep_special=False)
        highest = max(highest, *rendered.tokens)
    return highest


async def _begun(tokenizer: JobTokenizer, first: Observation) -> tuple[DialogueState, Rendered]:
    """Show the first observation, or with a message of the system if the template wants one.

    Raises:
        RejectedMessagesError: the template wants neither.
    """
    try:
        return await _opened(tokenizer, first)
    except RejectedMessagesError as refused:
        with_system = replace(first, messages=(_SYSTEM, *first.messages))
        try:
            return await _opened(tokenizer, with_system)
        except RejectedMessagesError:
            raise refused from None


async def _opened(tokenizer: JobTokenizer, first: Observation) -> tuple[DialogueState, Rendered]:
    state = DialogueState()
    rendered, prefix = await tokenizer.show(state.observed(first))
    state.shown(prefix)
    return state, rendered


def _digest(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(f"{name} {len(data)} ".encode() + hashlib.sha256(data).digest())
    return digest.hexdigest()
