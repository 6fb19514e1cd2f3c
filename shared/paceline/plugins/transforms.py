"""The protocol of transforms, which change the prompt of a task before the policy sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from paceline.enums import Purpose
from paceline.plugins.environments import Message, Observation
from paceline.types import Task


@dataclass(frozen=True, slots=True)
class TransformContext:
    """What a transform knows besides the first observation of a task."""

    task: Task
    purpose: Purpose  # training or evaluation
    seed: int
    """Of the group: the same for all of its episodes, and whenever they are generated again."""
    variant: str = ""  # of the allocator's start, or else of the sampler's pick
    meta: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of pick and start together
    tasks: tuple[Task, ...] = ()  # those that the start names


@dataclass(frozen=True, slots=True)
class Variant:
    """The prompt that the policy is shown, and what rewards and trajectories say of it.

    Name and meta take at most 1 KiB as JSON.
    """

    messages: tuple[Message, ...] = ()
    text: str = ""  # for observations without messages
    name: str = ""
    """Of the trajectory's provenance; empty: that of start or pick."""
    meta: Mapping[str, Any] = field(default_factory=dict[str, Any])  # added to that of the start
    train_as: Literal["sampled", "original"] = "sampled"
    """Which prompt the policy's tokens are trained under: the one that it saw, or the task's own.
    With the latter, their log-probs are still those of what was sampled."""


class Transform(Protocol):
    """Changes prompts.

    Called in environment workers, once for all episodes of a group that start the same way. An
    episode that moves to another worker has its prompt made again there, so the answer must depend
    on nothing but the arguments.
    """

    async def __call__(
        self, observation: Observation, context: TransformContext, /, **options: Any
    ) -> Variant:
        """The prompt in place of a first observation; its tools stay as they are.

        It must not block the event loop, and may take the job's `tasks.step_timeout_s`.
        """
        ...
