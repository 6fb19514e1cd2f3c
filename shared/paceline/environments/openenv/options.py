"""The options of an environment on an OpenEnv server, and what an operator allows."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from paceline.environments.texts import Template
from paceline.plugins import StrictModel

_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
_PORTS = {"ws": 80, "wss": 443}
Name = Annotated[str, Field(min_length=1, max_length=256)]


class OpenEnvOptions(StrictModel):
    """Which server, and how its actions and observations are written.

    Texts may name `{observation}`, all fields of an observation as lines, or any field of it.
    """

    base_url: str
    """`http`, `https`, `ws` or `wss`; of the hosts that the operator allows."""
    field: Name = "message"
    """The field of an action that gets the reply."""
    action: Literal["text", "integer", "number", "json"] = "text"
    """The type of that field; `json`: the reply is the whole action, an object."""
    fixed: dict[str, Any] = Field(default_factory=dict)
    """More fields of every action."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """More arguments of `reset`, besides `seed` and `episode_id`."""
    size: int = Field(default=1000, ge=1, le=10_000_000)
    """Number of tasks, each a seed of `reset`."""
    split: Literal["train", "heldout"] = "train"
    """Tasks of the two have no seed in common."""
    max_turns: int = Field(default=100, ge=1, le=10_000)
    """The episode ends as truncated after so many actions, valid or not."""
    system_prompt: Template = ""
    prompt: Template = "{observation}"
    """The first observation."""
    template: Template = "{observation}"
    """All later observations."""
    invalid: Template = "Not an action: {problem}"
    """The observation after a reply that is no action."""
    invalid_reward: float = 0.0
    """The reward of such a reply."""
    replayable: bool = False
    """Whether the same seed and actions always lead to the same state."""

    @field_validator("base_url")
    @classmethod
    def _is_url(cls, value: str) -> str:
        endpoint(value)
        return value


class OpenEnvSettings(StrictModel):
    """Servers that an operator allows jobs to connect to."""

    allow: tuple[Name, ...] = ()
    """`host:port`, or `host` for all of its ports, as jobs write them in `base_url`."""


def endpoint(base_url: str) -> tuple[str, str]:
    """The address of sessions, and `host:port`.

    Raises:
        ValueError: it is no URL of a server.
    """
    parts = urlsplit(base_url)
    scheme = _SCHEMES.get(parts.scheme, "")
    if not scheme or not parts.hostname:
        raise ValueError("a URL is needed, such as http://localhost:8000")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError("no user, query or fragment is allowed")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    port = parts.port or _PORTS[scheme]
    return f"{scheme}://{host}:{port}{parts.path.rstrip('/')}/ws", f"{host}:{port}"


def is_allowed(address: str, settings: OpenEnvSettings) -> bool:
    """Whether an operator allows `host:port`."""
    host = address.rpartition(":")[0]
    return bool({address, host} & {allowed.casefold() for allowed in settings.allow})
