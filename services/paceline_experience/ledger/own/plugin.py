"""A sampler or an allocator that came with a job: its memory, and calls that carry it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from paceline.config.named import NamedPlugin
from paceline.errors import InvalidError
from paceline.isolation.code.generation.messages import LACKS_MEMORY
from paceline.isolation.code.ledger_messages import context_fields
from paceline.platform.text import clipped
from paceline.plugins import Context
from paceline_experience.ledger.generation.learning import MAX_PROBLEM_BYTES, memory_name
from paceline_experience.ledger.generation.memory import Memory
from paceline_experience.ledger.own.ahead import AskedAhead
from paceline_experience.ledger.own.parts import OwnParts

Fields = Mapping[str, Any]


def _nothing() -> None:
    return


UNREADABLE = (TypeError, ValueError, LookupError, AttributeError, OverflowError)
"""What reading an answer may raise, which can be any JSON."""


class OwnPlugin:
    """Its process may die at any time, so a call has whatever the answer depends on."""

    def __init__(
        self, plugin: NamedPlugin, own: OwnParts, *, args: Sequence[Any] = (), given: Fields
    ) -> None:
        """It is made with `args`, the keywords `given` and the options of the job."""
        self.problem = ""
        self.on_answer: Callable[[], None] = _nothing
        self._plugin = plugin
        self._own = own
        self._made_with = {"args": list(args), "given": dict(given)}
        self._methods = own.needs(plugin)
        self._name = memory_name(plugin.options_field)
        self._ahead = AskedAhead(self._ask_ahead, failed=self._fail, name=plugin.options_field)
        self._texts: dict[str, str] = {}
        self.memory = 0  # grows when the memory changes

    @property
    def learns(self) -> bool:
        """Whether it has a memory."""
        return self.has("observe")

    def has(self, method: str) -> bool:
        """Whether it has an optional method."""
        return method in self._methods

    def remember(self, memory: Memory) -> None:
        """See `LearningPart`."""
        self._texts = memory.texts(self._name)
        self.memory += 1

    async def learn(self, context: Context, memory: Memory) -> dict[str, str]:
        """See `LearningPart`."""
        texts = memory.texts(self._name)
        told = context_fields(replace(context, memory={}), {})
        answer = await self.ask("observe", context=told, texts=texts, **self._where())
        try:
            changed: Any = answer.get("changed")
            if not isinstance(changed, Mapping):
                raise TypeError("an unreadable answer")
            return memory.changed(self._name, cast("Mapping[str, Any]", changed))
        except UNREADABLE as error:
            raise self.failed(error) from None

    async def ask(self, op: str, **fields: Any) -> Fields:
        """The answer to an operation; raises as `OwnParts.ask`."""
        memory = self.memory if self.learns else None
        asked = {**self._made_with, "memory": memory, **fields}
        answer = await self._own.ask(self._plugin, op, asked)
        if answer == LACKS_MEMORY:
            answer = await self._own.ask(self._plugin, op, {"texts": self._texts, **asked})
        return answer

    def close(self) -> None:
        """Ask for nothing more."""
        self._ahead.close()

    async def _ask_ahead(self) -> bool:
        """Ask for some of what will be needed; returns whether more is."""
        raise NotImplementedError

    def _fail(self, error: InvalidError) -> None:
        self.problem = self.problem or error.message
        self.on_answer()

    def _where(self) -> Fields:
        """The state at which it observes, if it has one."""
        return {}

    def failed(self, error: Exception) -> InvalidError:
        """What is wrong with an answer."""
        text = f"{self._plugin.options_field}: {self._plugin.name}: {type(error).__name__}: {error}"
        return InvalidError(clipped(text, MAX_PROBLEM_BYTES))
