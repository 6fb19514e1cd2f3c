"""The section `model.endpoint` of a job file."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from paceline.config.base import Options
from paceline.plugins import StrictModel
from paceline.plugins.endpoints import EndpointName

# Fields of a request for the messages, and for the form of the answer.
_OWN_FIELDS = frozenset({"model", "messages", "tools", "n", "stream", "stream_options"})


class EndpointModelSpec(StrictModel):
    """An OpenAI-compatible server that answers instead of workers of this installation."""

    name: EndpointName
    """Name of the server in the operator's `endpoints`, which have its address and its key."""
    concurrency: int = Field(default=16, ge=1, le=1024)
    """Requests of the job that each environment worker has open at a time."""
    timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    """Seconds in which a turn has to be answered, with all repetitions of its request; waiting
    for a place among `concurrency` does not count. Then the attempt has failed, and another one
    goes on from the turns so far (`experience.max_attempts`)."""
    request: Options = Field(default_factory=dict)
    """Further fields of each request; null leaves one out. Those that come from `sampling`
    (`temperature`, `top_p`, `top_k`, `min_p`, `max_tokens`, `stop`, `seed`) can be replaced."""

    @field_validator("request")
    @classmethod
    def _leaves_the_dialogue(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(_OWN_FIELDS & set(value)):
            raise ValueError(f"{taken[0]!r} is set by the job; allowed: all but {_own_fields()}")
        return value


def _own_fields() -> str:
    return ", ".join(sorted(_OWN_FIELDS))
