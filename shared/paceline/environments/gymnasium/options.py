"""The options of an environment of Gymnasium."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from paceline.environments.texts import Template
from paceline.plugins import StrictModel

_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
Name = Annotated[str, Field(min_length=1, max_length=256)]


class GymnasiumOptions(StrictModel):
    """Which environment, and how its observations and actions are written.

    Texts may name `{observation}`, `{actions}`, `{render}`, and the parts of a dictionary, tuple or
    vector by key or position: `{0}`.
    """

    id: str
    """A registered id, such as `FrozenLake-v1`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to `gymnasium.make`."""
    size: int = Field(default=1000, ge=1, le=10_000_000)
    """Number of tasks, each a seed of `reset`."""
    split: Literal["train", "heldout"] = "train"
    """Tasks of the two have no seed in common."""
    max_turns: int = Field(default=100, ge=1, le=10_000)
    """The episode ends as truncated after so many actions, valid or not."""
    actions: tuple[Name, ...] = Field(default=(), max_length=10_000)
    """Names of discrete actions, in their order; without, they are numbers."""
    observations: tuple[Name, ...] = Field(default=(), max_length=10_000)
    """Names of discrete observations, in their order."""
    match: Literal["last", "exact"] = "last"
    """The action is the last one that the reply names, or the whole reply."""
    system_prompt: Template = ""
    prompt: Template = "{observation}\n\nActions: {actions}"
    """The first observation."""
    template: Template = "{observation}"
    """All later observations."""
    invalid: Template = "Not an action. Actions: {actions}"
    """The observation after a reply that is no action."""
    invalid_reward: float = 0.0
    """The reward of such a reply."""
    invalid_ends: bool = False
    """Whether it ends the episode."""
    reuse: bool = True
    """Reset environments that have played an episode, instead of making new ones."""
    replayable: bool = True
    """Whether the same seed and actions always lead to the same state."""

    @field_validator("id")
    @classmethod
    def _is_registered(cls, value: str) -> str:
        """An id with a module would import any module there is."""
        if not _ID.fullmatch(value):
            raise ValueError(
                "an id that is registered, without a module, such as FrozenLake-v1; "
                "environments of your own come in the folder `code` of the job"
            )
        return value
