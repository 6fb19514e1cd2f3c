"""The replay of a job: an installed one, or one that came with it and runs in its process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from paceline.config import JobSpec
from paceline.config.named import NamedPlugin, own_ledger_parts
from paceline.errors import InvalidError, plugin_boundary
from paceline.isolation.code.generation.replay import (
    checked_guests,
    checked_places,
    guests_of,
    stored_fields,
)
from paceline.isolation.code.ledger_messages import group_fields
from paceline.platform.text import clipped
from paceline.plugins import Context, FinishedGroup, Guest, Replay, Stored, registry
from paceline_experience.ledger.generation.learning import MAX_PROBLEM_BYTES
from paceline_experience.ledger.own.parts import OwnParts
from paceline_experience.ledger.own.plugin import UNREADABLE


class AskedReplay(Protocol):
    """A replay whose answers are checked."""

    slow: bool
    """Whether answers may be a long time coming."""

    async def offer(
        self, group: FinishedGroup, stored: Sequence[Stored], context: Context
    ) -> tuple[Guest, ...]:
        """The guests of a group.

        Raises:
            InvalidError: it has failed, or answers something else.
            UnavailableError: it came with the job, and cannot be called for now.
        """
        ...

    async def keep(self, group: FinishedGroup, context: Context) -> tuple[int, ...]:
        """Places of the episodes to store; raises as `offer`."""
        ...


class InstalledReplay:
    """An `AskedReplay`."""

    slow = False

    def __init__(self, plugin: Replay, *, kind: str) -> None:
        self._plugin = plugin
        self._label = f"experience.replay: {kind}"

    async def offer(
        self, group: FinishedGroup, stored: Sequence[Stored], context: Context
    ) -> tuple[Guest, ...]:
        """See `AskedReplay`."""
        with plugin_boundary(self._label):
            answer = self._plugin.offer(group, stored, context)
            return checked_guests(answer, len(group.rewards), len(stored))

    async def keep(self, group: FinishedGroup, context: Context) -> tuple[int, ...]:
        """See `AskedReplay`."""
        with plugin_boundary(self._label):
            return checked_places(self._plugin.keep(group, context), len(group.rewards))


class OwnReplay:
    """An `AskedReplay`; its process may die at any time, so a call has all that it depends on."""

    slow = True

    def __init__(self, plugin: NamedPlugin, own: OwnParts) -> None:
        self._plugin, self._own = plugin, own

    async def offer(
        self, group: FinishedGroup, stored: Sequence[Stored], context: Context
    ) -> tuple[Guest, ...]:
        """See `AskedReplay`."""
        answer = await self._ask("offer", group, context, stored=stored_fields(stored))
        try:
            return checked_guests(guests_of(answer["guests"]), len(group.rewards), len(stored))
        except UNREADABLE as error:
            raise self.failed(error) from None

    async def keep(self, group: FinishedGroup, context: Context) -> tuple[int, ...]:
        """See `AskedReplay`."""
        answer = await self._ask("keep", group, context)
        try:
            return checked_places(answer["kept"], len(group.rewards))
        except UNREADABLE as error:
            raise self.failed(error) from None

    def failed(self, error: Exception) -> InvalidError:
        """What is wrong with an answer."""
        text = f"{self._plugin.options_field}: {self._plugin.name}: {type(error).__name__}: {error}"
        return InvalidError(clipped(text, MAX_PROBLEM_BYTES))

    async def _ask(
        self, op: str, group: FinishedGroup, context: Context, **fields: Any
    ) -> Mapping[str, Any]:
        told = (context.step, context.total_steps, context.seed)
        made_with: dict[str, Any] = {"args": [], "given": {}, "memory": None}
        asked = {**made_with, "group": group_fields(group), "context": told, **fields}
        return await self._own.ask(self._plugin, op, asked)


def asked_replay(spec: JobSpec, own: OwnParts) -> AskedReplay | None:
    """The replay of a job, if it has one.

    Raises:
        InvalidError: an installed one refuses its options.
    """
    found = spec.experience.replay
    if found is None:
        return None
    if (plugin := own_replay(spec)) is not None:
        return OwnReplay(plugin, own)
    return InstalledReplay(make_replay(found.kind, found.options), kind=found.kind)


def make_replay(kind: str, options: Mapping[str, Any]) -> Replay:
    """An installed replay."""
    return registry.find("replays", kind)(**options)


def own_replay(spec: JobSpec) -> NamedPlugin | None:
    """The replay of a job, if it is in the code that comes with it."""
    return next((each for each in own_ledger_parts(spec) if each.kind == "replays"), None)


async def try_replay(replay: AskedReplay, group: FinishedGroup, context: Context) -> None:
    """Offer a stored success to a group, and store what is wanted of it; raises as `AskedReplay`.

    One of the job's code is asked twice, and has to say the same again.
    """
    stored = [Stored(1.0, 0)]
    guests = await replay.offer(group, stored, context)
    kept = await replay.keep(group, context)
    if not isinstance(replay, OwnReplay):
        return
    again = await replay.offer(group, stored, context), await replay.keep(group, context)
    if again != (guests, kept):
        raise replay.failed(
            ValueError(
                f"asked again, it answers {again[0]} and {again[1]}, not {guests} and {kept}; an "
                "answer must follow from the arguments alone, since it is made anew after a restart"
            )
        )
