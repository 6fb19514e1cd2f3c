"""Environments: tasks, the world that plays them, and the descriptor that names both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.plugins.loading import attribute
from paceline.types import Task


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a dialogue."""

    role: str  # system | user | assistant | tool
    content: str


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment shows the policy: new messages, or plain text without a chat template."""

    messages: tuple[Message, ...] = ()
    text: str = ""
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class StepResult:
    """The environment's answer to an action."""

    observation: Observation
    reward: float
    done: bool
    truncated: bool = False


class Environment(Protocol):
    """One episode's world, made with the job's `tasks.options` (eval's overlaid) as keywords.

    `replayable`: the same seed and actions rebuild the same state.
    """

    replayable: bool

    async def reset(self, task: Task, seed: int) -> Observation:
        """Start the episode; returns the first observation."""
        ...

    async def step(self, action: str) -> StepResult:
        """Apply the policy's decoded turn."""
        ...

    async def close(self) -> None:
        """Release all resources."""
        ...


class TaskSource(Protocol):
    """A collection of tasks, addressed by position so that order is f(seed, epoch)."""

    def __len__(self) -> int:
        """Number of tasks in one epoch."""
        ...

    def __getitem__(self, position: int, /) -> Task:
        """The task at an index of the unshuffled collection."""
        ...


@dataclass(frozen=True, slots=True)
class EnvironmentPlugin:
    """Descriptor of an environment, named by an entry point in `paceline.environments`.

    Each part is `module:attribute` and imported only where it runs, so that what a world needs is
    not needed by the service that orders its tasks. `tasks` may be those of a data set that
    another environment's world plays.
    """

    tasks: str
    """`make(*, seed, **options) -> TaskSource`, called in experience."""
    world: str
    """`make(**options) -> Environment`, called in environment workers, once for each episode."""
    options: str = ""
    """Tells the options of both (see `paceline.config.options`), and is light to import: the
    gateway does. Without it experience checks them by the parameters of `tasks`."""

    def load_tasks(self) -> Callable[..., TaskSource]:
        """Import the factory of the task source.

        Raises:
            InvalidError: it cannot be imported.
        """
        return attribute(self.tasks)

    def load_world(self) -> Callable[..., Environment]:
        """Import the factory of worlds.

        Raises:
            InvalidError: it cannot be imported.
        """
        return attribute(self.world)
