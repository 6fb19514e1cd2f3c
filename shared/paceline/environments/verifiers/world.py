"""A rollout of an environment of verifiers as a world."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from paceline.environments.tool_calls import BadCall, tool_parser
from paceline.environments.verifiers.options import VerifiersOptions, VerifiersSettings
from paceline.errors import InvalidError
from paceline.errors.extras import installing
from paceline.plugins import Message, Observation, StepResult
from paceline.types import Task

try:
    from verifiers.types import (  # pyright: ignore[reportMissingImports]
        ResponseMessage,
        ToolCall,
    )

    from paceline.environments.verifiers.loaded import (
        LoadedEnvironments,
        VerifiersError,
        row_of,
        score,
    )
    from paceline.environments.verifiers.policy import Asked, AwaitingClient
except ImportError as error:
    raise InvalidError(
        f"the classic environments of verifiers are needed; {installing('verifiers')} ({error})"
    ) from None


class VerifiersWorld:
    """Plays one rollout: the environment asks for replies, and its rubric scores the whole.

    The reward comes with the last step. A reward function or tool that raises what the environment
    does not handle fails the attempt.
    """

    def __init__(self, *, settings: Mapping[str, Any], **options: Any) -> None:
        """`settings` are those of `VerifiersSettings`, options those of `VerifiersOptions`.

        Raises:
            InvalidError: the operator does not allow the environment.
        """
        self._options = VerifiersOptions.model_validate(options)
        self.replayable = self._options.replayable
        _check_allowed(self._options, VerifiersSettings.model_validate(settings))
        self._environment: Any = None
        self._client = AwaitingClient()
        self._rollout: asyncio.Task[Any] | None = None
        self._asked: Asked | None = None
        self._seen: list[Any] = []  # the conversation, up to and including the last reply

    async def reset(self, task: Task, seed: int) -> Observation:
        """Start the rollout of the task's row."""
        del seed
        options, wanted = self._options, json.loads(task.payload)
        key = json.dumps(options.args, sort_keys=True)
        environment = await asyncio.to_thread(_loaded().get, options.id, key, options.args)
        row = await asyncio.to_thread(row_of, environment, wanted["split"], wanted["row"])
        self._environment = environment
        self._rollout = asyncio.create_task(environment.rollout(row, self._client, "policy", {}))
        if not await self._awaits_reply():
            raise VerifiersError(f"{options.id}: the rollout is over before its first reply")
        return self._shown()

    async def step(self, action: str) -> StepResult:
        """Give the reply, and score the rollout if it was the last."""
        assert self._asked is not None
        assert self._rollout is not None
        message = self._reply(action)
        self._seen = [*self._asked.prompt, message]
        if not self._asked.reply.done():  # the rollout may have run out of its own time
            self._asked.reply.set_result(message)
        if await self._awaits_reply():
            return StepResult(self._shown(), reward=0.0, done=False)
        state = self._rollout.result()
        if (error := state.get("error")) is not None:
            raise VerifiersError(f"{self._options.id}: {type(error).__name__}: {error}")
        self._rollout = scoring = asyncio.create_task(score(self._environment, state))
        try:
            reward = await scoring
        except asyncio.CancelledError:
            raise VerifiersError(f"{self._options.id}: it was closed while scored") from None
        return StepResult(Observation(), reward, done=True)

    async def close(self) -> None:
        """End the rollout, which cleans up after itself."""
        rollout, self._rollout = self._rollout, None
        if rollout is not None and not rollout.done():
            rollout.cancel()
            with suppress(asyncio.CancelledError):
                await rollout

    def _reply(self, text: str) -> Any:
        """A reply with its calls of tools; of one that cannot be read, the environment tells so."""
        assert self._asked is not None
        calls: list[ToolCall] = []
        for call in tool_parser(self._options.tool_parser)(text) if self._asked.tools else ():
            bad = isinstance(call, BadCall)
            calls.append(
                ToolCall(
                    id=f"call_{len(self._seen)}_{len(calls)}",
                    name="unreadable" if bad else call.name,
                    arguments=call.problem if bad else json.dumps(call.arguments),
                )
            )
        reason = "tool_calls" if calls else "stop"
        return ResponseMessage(
            content=text, tool_calls=calls or None, finish_reason=reason, is_truncated=False
        )

    async def _awaits_reply(self) -> bool:
        """Wait until the rollout asks for a reply; False if it ends."""
        assert self._rollout is not None
        asking = asyncio.create_task(self._client.asked.get())
        try:
            await asyncio.wait({asking, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asking.cancel()
        if not asking.done() or asking.cancelled():
            return False
        self._asked = asking.result()
        return True

    def _shown(self) -> Observation:
        """The messages that the prompt adds to the conversation."""
        assert self._asked is not None
        prompt, seen = self._asked.prompt, self._seen
        if [*map(_content, prompt[: len(seen)])] != [*map(_content, seen)]:
            text = "changes earlier messages, so the policy's tokens cannot be kept"
            raise VerifiersError(f"{self._options.id} {text}")
        messages = tuple(_message(message) for message in prompt[len(seen) :])
        return Observation(
            messages=messages,
            text="\n\n".join(message.content for message in messages),
            tools=() if seen else tuple(map(_tool, self._asked.tools)),
        )


def of_own_code(**options: Any) -> VerifiersWorld:
    """The world of an environment in the folder of a job, whose module is `options["id"]`."""
    settings = {"allow": [options.get("id", "")], "allow_args": ["*"]}
    return VerifiersWorld(settings=settings, **options)


def _check_allowed(options: VerifiersOptions, settings: VerifiersSettings) -> None:
    where = "an operator can allow it in options.worlds.verifiers of the environment workers"
    if options.id not in settings.allow:
        raise InvalidError(f"tasks.options.id: {options.id!r} is not allowed here; {where}: allow")
    wrong = sorted({*options.args} - {*settings.allow_args})
    if wrong and "*" not in settings.allow_args:
        raise InvalidError(
            f"tasks.options.args: {wrong[0]!r} is not allowed here; {where}: allow_args"
        )


@cache
def _loaded() -> LoadedEnvironments:
    """State that the episodes in this process share."""
    return LoadedEnvironments()


def _message(message: Any) -> Message:
    """A message as the policy's template shows it, with the calls of one that it did not write."""
    calls = tuple(map(_call, getattr(message, "tool_calls", None) or ()))
    call_id = getattr(message, "tool_call_id", None) or ""
    return Message(str(message.role), _content(message), tool_call_id=call_id, tool_calls=calls)


def _call(call: Any) -> dict[str, Any]:
    """A call in the form of chat templates, which want its arguments as an object."""
    try:
        arguments: Any = json.loads(call.arguments or "{}")
    except ValueError:
        arguments = call.arguments  # as an environment wrote it
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _tool(tool: Any) -> dict[str, Any]:
    """A tool in the form of OpenAI's API."""
    fields = ("name", "description", "parameters")
    return {"type": "function", "function": {name: getattr(tool, name) for name in fields}}


def _content(message: Any) -> str:
    """The text of a message; raises `InvalidError` if it has any other content."""
    content = message.content
    if content is None or isinstance(content, str):
        return content or ""
    parts: Sequence[Any] = content
    texts = [part.get("text") for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidError("tasks.options.id: messages with images or sound cannot be shown")
    return "".join(texts)
