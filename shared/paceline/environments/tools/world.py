"""The world of one question: answers calls of tools until a turn has none, which is the answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from paceline.environments.texts import user_message
from paceline.environments.tool_calls import ParserName, tool_parser
from paceline.environments.toolbox import Function, Toolbox
from paceline.environments.tools.calculator import calculator
from paceline.environments.tools.corpus import index
from paceline.environments.tools.notes import Notes
from paceline.environments.tools.tasks import SYSTEM, TOOLS, ToolName, check
from paceline.plugins import Observation, StepResult
from paceline.types import Task

_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


class Tools:
    """A turn without calls is the answer: reward 1 if its last number is right.

    An episode that reaches its limit of turns without one ends with reward 0.
    """

    replayable = True

    def __init__(
        self,
        *,
        tools: Sequence[ToolName] = TOOLS,
        tool_parser: ParserName = "hermes",
        max_turns: int = 8,
        results: int = 3,
        system_prompt: str = SYSTEM,
        **of_tasks: Any,
    ) -> None:
        del of_tasks
        check(tools=tools, parser=tool_parser, max_turns=max_turns, results=results)
        self._names, self._parser = tools, tool_parser
        self._most_turns = self._left = max_turns
        self._results = results
        self._system = system_prompt
        self._answer = ""
        self._box = Toolbox(())

    async def reset(self, task: Task, seed: int) -> Observation:
        """Show the question and the tools."""
        del seed
        payload = json.loads(task.payload)
        self._answer = str(payload["answer"])
        self._left = min(self._most_turns, int(payload.get("max_turns", self._most_turns)))
        notes = Notes(payload.get("notes", {}))
        self._box = Toolbox(self._functions(notes), parser=tool_parser(self._parser))
        shown = user_message(str(payload["question"]), system_prompt=self._system)
        return replace(shown, tools=self._box.schemas)

    async def step(self, action: str) -> StepResult:
        """Answer the calls, or judge the answer."""
        self._left -= 1
        answers = self._box.answers(action)
        if answers:
            return StepResult(Observation(messages=answers), 0.0, done=self._left <= 0)
        right = final_number(action) == final_number(self._answer)
        return StepResult(Observation(), float(right), done=True)

    async def close(self) -> None:
        """Release nothing."""

    def search(self, query: str) -> str:
        """Search in sentences about rivers, mountains, bridges and towers."""
        return "\n".join(index().best(query, self._results)) or "nothing found"

    def _functions(self, notes: Notes) -> Iterable[Function]:
        if "calculator" in self._names:
            yield calculator
        if "search" in self._names:
            yield self.search
        if "notes" in self._names:
            yield from (notes.write_note, notes.read_note)


def final_number(text: str) -> float | None:
    """The last number of a text."""
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None
