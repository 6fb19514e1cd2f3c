"""The transform of a job's own code, in a process of the job."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

from paceline.errors import InvalidError
from paceline.isolation.code.dialogue import messages_of, observation_fields
from paceline.isolation.code.world_process import WorldError, WorldRefusedError
from paceline.plugins import Observation, TransformContext, Variant
from paceline_environment.worlds.processes import JobProcesses


class RemoteTransform:
    """A `Transform` that lives elsewhere; a process that has ended is replaced by the next call."""

    def __init__(self, processes: JobProcesses, options: Mapping[str, Any]) -> None:
        self._processes = processes
        self._options = dict(options)

    async def __call__(self, observation: Observation, context: TransformContext, /) -> Variant:
        """See `Transform`.

        Raises:
            InvalidError: it cannot be loaded, has raised, or answers with something else.
            ProcessEndedError: its process has ended; the call may be repeated.
        """
        host = await self._processes.host()
        try:
            await asyncio.shield(host.loading)
            answer = await host.process.call(
                "transform",
                observation=observation_fields(observation),
                context=_fields(context),
                options=self._options,
            )
        except (WorldError, WorldRefusedError) as error:
            raise InvalidError(error.message.removeprefix("environment: ")) from None
        finally:
            await self._processes.leave(host)
        return _variant(answer)


def _fields(context: TransformContext) -> dict[str, Any]:
    return {
        "task": asdict(context.task),
        "purpose": context.purpose.value,
        "seed": context.seed,
        "variant": context.variant,
        "meta": dict(context.meta),
        "tasks": [asdict(task) for task in context.tasks],
    }


def _variant(raw: Mapping[str, Any]) -> Variant:
    """The variant that the job sent; its size and `train_as` are checked like any other's."""
    try:
        return Variant(
            messages=messages_of(raw["messages"]),
            text=str(raw["text"]),
            name=str(raw["name"]),
            meta=dict(cast("Mapping[str, Any]", raw["meta"])),
            train_as=raw["train_as"],
        )
    except (TypeError, ValueError, KeyError) as error:
        raise InvalidError(f"unreadable variant: {error}") from None
