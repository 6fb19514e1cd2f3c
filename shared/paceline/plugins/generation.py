"""The protocols of what is generated: which task comes next, and what a sampler learns from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from paceline.plugins.episodes import Context, GroupOutcome

MAX_PICK_BYTES = 1024  # variant and meta as JSON; a pick is kept until its group is durable
MAX_CURSOR_BYTES = 1024  # the state of a sampler, which is written at every admission


@dataclass(frozen=True, slots=True)
class Pick:
    """A task to admit. Variant and meta take at most 1 KiB as JSON, and are part of outcomes."""

    task: int  # position in the task source
    variant: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Sampler(Protocol):
    """Decides the order of tasks."""

    def next(self) -> Pick | int | None:
        """The next task, by its position alone or as a `Pick`; None after the last epoch."""
        ...

    def state(self) -> dict[str, Any]:
        """JSON-compatible cursor of at most 1 KiB, restored by `load`."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        ...


@runtime_checkable
class Learns(Protocol):
    """What a sampler may have in addition: a memory, which belongs to the ledger.

    It changes only in the write that fixes a batch, so an object with both methods draws the same
    tasks after any crash.
    """

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Draw with this memory from now on: JSON values by key, read-only.

        Called at the start, after every batch, and again with the same values after a restart.
        """
        ...

    def observe(self, outcomes: Sequence[GroupOutcome], context: Context) -> Mapping[str, Any]:
        """Learn from all groups decided since the last batch, in the order of their tasks.

        Must not change what is drawn until `remember`: the write may still fail. `context.memory`
        is the present memory.

        Returns:
            Keys of the memory to change and their new JSON values; None deletes a key.
        """
        ...
