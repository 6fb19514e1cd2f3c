"""What the processes that fetch and unpack wheels are asked, and answer: JSON, once each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from paceline.code.wheels.sources import WheelSources
from paceline.sandbox.hold import Hold


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
    """What was fetched or unpacked; `error` says why nothing was."""

    wheels: tuple[LocalWheel, ...] = ()
    error: str = ""


FETCH = TypeAdapter(FetchRequest)
UNPACK = TypeAdapter(UnpackRequest)
REPLY = TypeAdapter(WheelsReply)
