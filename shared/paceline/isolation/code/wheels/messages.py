"""What the processes that fetch and unpack wheels are asked, once each, and answer, as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from paceline.isolation.code.wheels.sources import WheelSources
from paceline.isolation.sandbox.hold import Hold

HANDLE = "handle"
"""The call that has such a `request`."""
MOST_ANSWER_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class LocalWheel:
    """A wheel on this machine, and its SHA-256."""

    path: Path
    digest: str


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Write wheels for requirements to the folder `into`."""

    requirements: tuple[str, ...]  # lines with `--hash`
    constraints: tuple[str, ...]
    own: tuple[LocalWheel, ...]  # of the job's code
    sources: WheelSources
    into: Path
    most_bytes: int  # of all wheels, packed and unpacked
    hold: Hold


@dataclass(frozen=True, slots=True)
class UnpackRequest:
    """Unpack wheels to the folder `into`."""

    wheels: tuple[LocalWheel, ...]
    into: Path
    hold: Hold


@dataclass(frozen=True, slots=True)
class WheelsReply:
    """What was fetched or unpacked."""

    wheels: tuple[LocalWheel, ...] = ()


FETCH = TypeAdapter(FetchRequest)
UNPACK = TypeAdapter(UnpackRequest)
REPLY = TypeAdapter(WheelsReply)
