"""Calls a job's transform, and checks what it answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from paceline.config.base import PluginSpec
from paceline.errors import DeadlineError, InvalidError, PacelineError, plugin_boundary
from paceline.platform.telemetry.logs import Log
from paceline.plugins import (
    MAX_PICK_BYTES,
    Message,
    Observation,
    TransformContext,
    Variant,
    registry,
)
from paceline.types import Transcript

log = Log("transform")
Call = Callable[[Observation, TransformContext], Coroutine[Any, Any, Any]]


@dataclass(frozen=True, slots=True)
class ShownVariant:
    """A prompt that took the place of a task's own."""

    observation: Observation
    name: str
    meta: str  # JSON
    original: bool  # whether to train under the task's own prompt


class JobTransform:
    """The transform of a job, with its options and the time that it may take."""

    def __init__(self, call: Call, *, kind: str, timeout_s: float) -> None:
        self._call = call
        self._label = f"tasks.transform: {kind}"
        self._timeout_s = timeout_s

    @classmethod
    def of(cls, plugin: PluginSpec, *, timeout_s: float) -> JobTransform:
        """An installed one; raises as `registry.find`."""
        call = partial(registry.find("transforms", plugin.kind), **plugin.options)
        return cls(call, kind=plugin.kind, timeout_s=timeout_s)

    async def __call__(self, observation: Observation, context: TransformContext) -> ShownVariant:
        """The prompt to show.

        Raises:
            InvalidError: it has failed, or its answer cannot be used.
            DeadlineError: it took too long.
        """
        report = partial(log.exception, "a transform has failed", transform=self._label)
        try:
            async with asyncio.timeout(self._timeout_s):
                with plugin_boundary(passes=(PacelineError,), report=report):
                    answer = await self._call(observation, context)
                    return _check(answer, observation, context)
        except TimeoutError:
            raise DeadlineError(
                f"{self._label} took more than {self._timeout_s:g} s (tasks.step_timeout_s)"
            ) from None
        except PacelineError as error:
            raise type(error)(f"{self._label}: {error.message}") from error


def _check(variant: Any, observation: Observation, context: TransformContext) -> ShownVariant:
    if not isinstance(variant, Variant):
        raise InvalidError(f"it returned {type(variant).__name__}; Variant is needed")
    if not variant.messages and not variant.text:
        raise InvalidError("it returned an empty prompt")
    messages: tuple[Any, ...] = tuple(variant.messages)
    if not all(isinstance(message, Message) for message in messages):
        raise InvalidError("it returned messages that are not of the type Message")
    if variant.train_as not in {"sampled", "original"}:
        raise InvalidError(f"train_as {variant.train_as!r}; allowed: sampled, original")
    serialized = json.dumps({"variant": variant.name, "meta": dict(variant.meta)}, allow_nan=False)
    if len(serialized) > MAX_PICK_BYTES:
        raise InvalidError(
            f"a variant has {len(serialized)} bytes; at most {MAX_PICK_BYTES} are allowed"
        )
    meta = {**context.meta, **variant.meta}
    return ShownVariant(
        observation=replace(observation, messages=messages, text=variant.text),
        name=variant.name or context.variant,
        meta=json.dumps(meta) if meta else "",
        original=variant.train_as == "original",
    )


def with_prompt(transcript: Transcript, prompt: Transcript) -> Transcript:
    """The same policy tokens after another prompt, and marked so, unless it is the same one.

    Log-probs and versions stay those under the prompt that the policy was shown.
    """
    first = next((s.start for s in transcript.spans if s.source == "policy"), None)
    if first is None or transcript.tokens[:first] == prompt.tokens:
        return transcript
    shift = len(prompt.tokens) - first

    def shift_span(span: Any) -> Any:
        return replace(span, start=span.start + shift, end=span.end + shift)

    return replace(
        transcript,
        tokens=prompt.tokens + transcript.tokens[first:],
        spans=(*prompt.spans, *(shift_span(s) for s in transcript.spans if s.start >= first)),
        steps=tuple(map(shift_span, transcript.steps)),
        branch_token=transcript.branch_token + shift if transcript.branch_token else 0,
        original_prompt=True,
    )


def parsed(meta: str) -> Mapping[str, Any]:
    """The meta of a start."""
    return json.loads(meta) if meta else {}
