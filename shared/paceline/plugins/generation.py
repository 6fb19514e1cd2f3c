"""The protocols of what is generated: which task comes next, and how many episodes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from paceline.plugins.episodes import Context, GroupOutcome

MAX_PICK_BYTES = 1024  # variant and meta as JSON, of a pick or a start
MAX_WAVE = 512  # episodes that an allocator may start at once
MAX_WAVES = 8  # per group
MAX_NAMED_TASKS = 16  # other tasks that the starts of a group name, together
MAX_STARTS_BYTES = 16 << 10  # all that is not a default in the starts of a group, as JSON
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


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one episode, on top of the job's `sampling`; None: no other than those."""

    max_turns: int | None = None
    max_tokens: int | None = None  # of the policy, over all turns
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """An episode to begin. Variant and meta take at most 1 KiB as JSON."""

    variant: str = ""
    parent: tuple[int, int] | None = None
    """Continue a finished sibling: its index in the group, and how many of its tokens to keep. Only
    in a later wave. Kept tokens are trained once, in the sibling."""
    limits: Limits = Limits()
    meta: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tasks: tuple[int, ...] = ()
    """Positions of other tasks for the job's transform, such as examples; up to 16 per group."""


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """A turn of a finished episode."""

    end: int  # tokens of the transcript up to its end
    reward: float = 0.0  # as the environment gave it
    matched_expert: bool = False
    patched: bool = False
    first_error: bool = False


@dataclass(frozen=True, slots=True)
class FinishedEpisode:
    """A scored episode of a group that is not decided yet."""

    index: int  # in its group
    start: Start
    reward: float
    answer: str = ""  # as normalised by the reward, clipped
    length: int = 0  # policy tokens
    truncated: bool = False
    parts: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    turns: tuple[FinishedTurn, ...] = ()  # the first 64


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """What is known of a group before filters see it."""

    pick: Pick
    episodes: Sequence[FinishedEpisode]  # finished ones, in the order of their indices
    num_open: int = 0  # queued or leased
    waves: int = 1  # begun so far

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards of the finished episodes."""
        return tuple(each.reward for each in self.episodes)


class Allocator(Protocol):
    """Decides how many episodes a task gets, and under which limits. It may learn (`Learns`).

    An installed one is called inside the experience service, so it must be quick; that of a job's
    code in a process of the job. Either depends on nothing but its arguments and its memory.
    """

    def start(self, pick: Pick, context: Context) -> Sequence[Start]:
        """The first wave: 1 to 512 episodes. Called again if the task has to be generated again."""
        ...

    def more(self, group: OpenGroup, context: Context) -> Sequence[Start]:
        """Another wave of at most 512 episodes once all are finished; none: the group is closed.

        A group has at most 8 waves.
        """
        ...


@runtime_checkable
class ClosesEarly(Protocol):
    """What an allocator may have in addition: groups that do not wait for all their episodes."""

    def enough(self, group: OpenGroup) -> bool:
        """Whether to close the group with what has finished; the rest is aborted as surplus.

        Asked whenever an episode has finished and others are open.
        """
        ...
