"""Plug-ins that learn from the outcomes of groups, and their part of the job's memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from paceline.errors import InvalidError, plugin_boundary
from paceline.platform.telemetry.logs import Log
from paceline.platform.text import clipped
from paceline.plugins import Context, Learns
from paceline_experience.ledger.generation.memory import Memory

MAX_PROBLEM_BYTES = 4000
log = Log("learning")


class LearningPart(Protocol):
    """A plug-in that learns, wherever it runs."""

    @property
    def problem(self) -> str:
        """Why it cannot go on, so that the job fails; empty: it can."""
        ...

    def remember(self, memory: Memory) -> None:
        """Draw with this memory from now on."""
        ...

    async def learn(self, context: Context, memory: Memory) -> dict[str, str]:
        """Texts of the keys that change; it is told of them by `remember`.

        Raises:
            InvalidError: it has failed, or its memory is too large.
            UnavailableError: it came with the job, and cannot be called for now.
        """
        ...


def memory_name(field: str) -> str:
    """What the keys begin with of a plug-in that the job names at a field.

    Those of advantages begin with their names, which contain no '@'.
    """
    return f"@{field.rpartition('.')[2]}"


class LearningPlugin:
    """An installed one; `problem` says why it cannot go on, and the job fails with it."""

    def __init__(self, plugin: Learns, *, field: str, kind: str) -> None:
        self._plugin = plugin
        self._label = f"{field}: {kind}"
        self._name = memory_name(field)
        self.problem = ""

    def remember(self, memory: Memory) -> None:
        """See `LearningPart`."""
        try:
            with self._boundary():
                self._plugin.remember(memory.of(self._name))
        except InvalidError as error:
            problem = clipped(error.full_message, MAX_PROBLEM_BYTES)
            self.problem = self.problem or problem

    async def learn(self, context: Context, memory: Memory) -> dict[str, str]:
        """See `LearningPart`."""
        own = memory.of(self._name)
        with self._boundary():
            changed: Any = self._plugin.observe(context.outcomes, replace(context, memory=own))
            if not isinstance(changed, Mapping):
                raise TypeError(f"an answer of type {type(changed).__name__}; a mapping is needed")
            return memory.changed(self._name, changed)

    def _boundary(self) -> AbstractContextManager[None]:
        report = partial(log.exception, "a plug-in that learns has failed", plugin=self._label)
        return plugin_boundary(self._label, report=report)
