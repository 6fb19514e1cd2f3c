"""The options of an environment of verifiers, and what an operator allows."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from paceline.environments.tool_calls import ParserName
from paceline.plugins import StrictModel

EnvironmentId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$", max_length=256)]


class VerifiersOptions(StrictModel):
    """Which environment, and which rows of its data set."""

    id: EnvironmentId
    """Name that `verifiers.load_environment` takes."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Passed to `load_environment`."""
    size: int = Field(ge=1, le=10_000_000)
    """Number of tasks: the first rows of the data set."""
    split: Literal["train", "eval"] = "train"
    """The data set: `get_dataset` or `get_eval_dataset`."""
    tool_parser: ParserName = "hermes"
    """How the model writes calls of tools, if the environment has any."""
    replayable: bool = False
    """Whether the same row and replies always lead to the same messages."""


class VerifiersSettings(StrictModel):
    """Environments that an operator allows jobs to load."""

    allow: tuple[EnvironmentId, ...] = ()
    """Ids of installed environments."""
    allow_args: tuple[str, ...] = ()
    """Names of arguments that jobs may set; `*`: any. With some of them, environments reach other
    hosts or read variables of the worker."""
