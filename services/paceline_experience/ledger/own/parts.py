"""What the ledger asks of the code that came with its job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from paceline.config.named import NamedPlugin
from paceline.errors import InvalidError
from paceline.plugins import Advantages, Context, EpisodeBatch, FinishedGroup
from paceline_experience.ledger.filters.answer import FilterDecision


class OwnParts(Protocol):
    """They run in a process of the job, which may be slow, hang or die."""

    @property
    def unanswered(self) -> str:
        """Which of them has not answered for a second or more; empty: none."""
        ...

    def needs(self, plugin: NamedPlugin) -> frozenset[str]:
        """What a plug-in declares that it needs, and the optional methods that it has."""
        ...

    async def ask(
        self, plugin: NamedPlugin, op: str, fields: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """What a sampler or an allocator answers to an operation, unchecked; JSON on both ways.

        Raises:
            InvalidError: it has raised, or has no answer in time.
            UnavailableError: it cannot be called for now, through no fault of the job.
        """
        ...

    async def decided(self, plugin: NamedPlugin, group: FinishedGroup) -> FilterDecision:
        """What a filter says of a group; why it drops one is not asked.

        Raises:
            InvalidError: it has raised, has no answer in time, or answers something else.
            UnavailableError: it cannot be called for now, through no fault of the job.
        """
        ...

    async def advantages(
        self,
        plugin: NamedPlugin,
        batch: EpisodeBatch,
        context: Context,
        memory: Mapping[str, str],
    ) -> Advantages:
        """What an advantage returns, unchecked; `memory` has the JSON text of each of its values.

        Raises:
            InvalidError: as `decided`.
            UnavailableError: as `decided`.
        """
        ...


class NoParts:
    """Of a ledger that is only read, or of a job without any."""

    unanswered = ""

    def needs(self, plugin: NamedPlugin) -> frozenset[str]:
        """Nothing."""
        del plugin
        return frozenset()

    async def ask(
        self, plugin: NamedPlugin, op: str, fields: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Raises."""
        del op, fields
        raise _refused(plugin)

    async def decided(self, plugin: NamedPlugin, group: FinishedGroup) -> FilterDecision:
        """Raises."""
        del group
        raise _refused(plugin)

    async def advantages(
        self,
        plugin: NamedPlugin,
        batch: EpisodeBatch,
        context: Context,
        memory: Mapping[str, str],
    ) -> Advantages:
        """Raises."""
        del batch, context, memory
        raise _refused(plugin)


NO_PARTS = NoParts()


def _refused(plugin: NamedPlugin) -> InvalidError:
    return InvalidError(f"{plugin.field}: {plugin.name!r}: this service takes no code of jobs")
