"""The protocols of environments: tasks, the world they are played in, and a descriptor of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from paceline.plugins.loading import attribute
from paceline.types import Task

Replies = Literal["none", "user", "tools"]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a dialogue."""

    role: str  # system | user | assistant | tool
    content: str
    name: str = ""  # of the tool that answers, for templates that show it
    tool_call_id: str = ""  # for templates that require one
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """Calls of an assistant: `{type: function, function: {name, arguments}}`, with the arguments as
    an object, as templates want them, and perhaps an `id`."""


@dataclass(frozen=True, slots=True)
class Observation:
    """New input for the policy: messages, or plain text.

    With a chat template, plain text alone is a message of the user. Models without one are shown
    the text, or the contents of the messages if there is none.

    `tools`: functions that the policy may call in this episode, as JSON schemas in the form of
    OpenAI's API and of `apply_chat_template(tools=...)`. Only a first observation may have any.
    """

    messages: tuple[Message, ...] = ()
    text: str = ""
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The environment's response to an action."""

    observation: Observation
    reward: float
    done: bool
    truncated: bool = False


class Environment(Protocol):
    """The world of one episode, created with the job's `tasks.options` (or the eval's) as keywords.

    `replayable`: the same seed and actions rebuild the same state.
    """

    replayable: bool

    async def reset(self, task: Task, seed: int) -> Observation:
        """Start the episode and return the first observation."""
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


@runtime_checkable
class FindsTasks(Protocol):
    """What a task source may have in addition: it knows where a task is.

    Without it, whoever has only the id of a task looks through all of a source.
    """

    def position_of(self, task_id: str, /) -> int | None:
        """A position of the task with this id, at once; None: there is no such task."""
        ...


@dataclass(frozen=True, slots=True)
class EnvironmentPlugin:
    """The descriptor of an environment, the target of an entry point in `paceline.environments`.

    Each part is `module:attribute` and imported only where it runs, so that the service that orders
    tasks does not need the dependencies of the world. Several environments may share a world and
    differ in their `tasks`.
    """

    tasks: str
    """`make(*, seed, **options) -> TaskSource`, called in the experience service."""
    world: str
    """`make(**options) -> Environment`, called in environment workers, once per episode."""
    options: str = ""
    """Describes the options of both (see `paceline.config.options`). It must be light to import,
    since the gateway imports it. If empty, the experience service checks options against the
    parameters of `tasks`."""
    worlds_in: Literal["worker", "process", "sealed"] = "worker"
    """Where worlds live: in the environment worker itself, whose loop they must not block; in
    processes of their job beside it, with the network and files of the worker; or in sealed
    processes of their job, like those of its own code."""
    replies: Replies = "user"
    """Who answers the policy's turns: nobody, since episodes have one turn, the user, or tools too.
    A job whose chat template cannot show that is refused when it is submitted."""
    settings: str = ""
    """A model of what an operator sets for it: `worlds.NAME` in the options of environment workers.
    If given, `world` gets them as the keyword `settings`, a mapping that the model accepts."""

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
