"""Section `tracking` of the job file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, cast

from pydantic import Field, field_validator, model_validator

from paceline.config.base import Name, PluginSpec, Seconds
from paceline.plugins import StrictModel

# Fields that hold credentials, and credentials inside a URL.
_SECRET = re.compile(r"(?i)(^|[._-])(api_?)?(key|token|secret|password|passwd|credentials?)$")
_IN_URL = re.compile(r"(?i)://[^/@\s]+@|[?&](api_?key|\w*token|secret|password)=")


class TrackedSamples(StrictModel):
    """Trajectories logged to trackers as a table."""

    every: int = Field(default=10, gt=0, le=1_000_000)
    """In trainer steps."""
    count: int = Field(default=4, ge=1, le=64)
    """Trajectories per logged step, the newest ones."""


class TrackingSpec(PluginSpec):
    """One experiment tracker. Its address and keys are not part of a job: see docs/tracking.md."""

    name: Name | None = None
    """Name of this tracker in the job's status; `kind` if null."""
    axis: Literal["step", "version"] = "step"
    """X axis of curves: the trainer's step, which rewinds after a crash, or the version of the
    weights, which only grows."""
    system_s: Seconds | None = 15.0
    """Interval between samples of worker activity; none if null."""
    samples: TrackedSamples | None = TrackedSamples()
    timeout_s: float = Field(default=60.0, gt=0, le=86400.0)
    """A tracker that takes longer over any call is restarted."""

    @property
    def label(self) -> str:
        """Name of this tracker."""
        return self.name or self.kind

    @field_validator("kind")
    @classmethod
    def _is_installed_by_name(cls, value: str) -> str:
        if ":" in value:
            raise ValueError(
                f"{value!r}: a tracker runs where its keys are, so only installed ones may be "
                "named; give yours an entry point in paceline.trackers"
            )
        return value

    @model_validator(mode="after")
    def _holds_no_secret(self) -> TrackingSpec:
        for field, value in _leaves(self.options):
            if is_secret(field, value):
                raise ValueError(
                    f"{field}: a job file must not hold secrets; put them into the environment of "
                    "the tracking service (see docs/tracking.md)"
                )
        return self


def is_secret(field: str, value: Any) -> bool:
    """Whether a field is named as one that holds credentials, or its value is a URL with some."""
    return bool(_SECRET.search(field) or (isinstance(value, str) and _IN_URL.search(value)))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value within mappings and lists, with its dotted path."""
    if isinstance(value, dict):
        for key, inner in cast(dict[str, Any], value).items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, inner in enumerate(cast(list[Any], value)):
            yield from _leaves(inner, f"{path}.{index}")
    else:
        yield path, value
