"""Plug-ins that learn from the outcomes of groups, and their part of the job's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.errors import InvalidError
from paceline.plugins import Context, Learns
from paceline.telemetry.logs import Log
from paceline.text import clipped
from paceline_experience.ledger.generation.memory import Memory

MAX_PROBLEM_BYTES = 4000
log = Log("learning")


class LearningPlugin:
    """One of them; `problem` says why it cannot go on, and the job fails with it."""

    def __init__(self, plugin: Learns, *, field: str, kind: str) -> None:
        self._plugin = plugin
        self._label = f"{field}: {kind}"
        # Advantages have the keys that begin with their names, which contain no '@'.
        self._name = f"@{field.rpartition('.')[2]}"
        self.problem = ""

    def remember(self, memory: Memory) -> None:
        """Draw with this memory from now on."""
        try:
            self._plugin.remember(memory.of(self._name))
        except (Exception, SystemExit) as error:  # the boundary of a plug-in
            self.problem = self.problem or self._failed(error)

    def learn(self, context: Context, memory: Memory) -> dict[str, str]:
        """Texts of the keys that change; the plug-in is told of them by `remember`.

        Raises:
            InvalidError: it has failed, or its memory is too large.
        """
        own = memory.of(self._name)
        try:
            changed: Any = self._plugin.observe(context.outcomes, replace(context, memory=own))
            if not isinstance(changed, Mapping):
                raise TypeError(f"an answer of type {type(changed).__name__}; a mapping is needed")
            return memory.changed(self._name, changed)
        except (Exception, SystemExit) as error:  # the boundary of a plug-in
            raise InvalidError(self._failed(error)) from error

    def _failed(self, error: BaseException) -> str:
        log.exception("a plug-in that learns has failed", plugin=self._label)
        return clipped(f"{self._label}: {type(error).__name__}: {error}", MAX_PROBLEM_BYTES)
