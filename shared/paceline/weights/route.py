"""Whom a worker pulls a version from, and what it tells of how that went."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from paceline.types import PolicyVersion

Event = Literal["done", "moved", "stalled", "slow", "failed", "damaged"]
EVENTS: tuple[Event, ...] = get_args(Event)


@dataclass(frozen=True, slots=True)
class Source:
    """A peer and the chunks to ask it for: those with `index % parts == part`."""

    endpoint: str  # http://host:port
    part: int = 0
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Route:
    """Pull `version` from all `sources` at once; what one fails to give, from a fallback."""

    version: PolicyVersion
    sources: tuple[Source, ...]
    fallbacks: tuple[str, ...] = ()  # endpoints, best first
    bytes_per_s: float = 0.0  # expected over all sources; 0: unknown
    base_version: int = -1  # ask for differences against it, if it is held whole; -1: never
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """How much of a version a worker has."""

    version: int
    num_ready: int  # chunks verified
    num_chunks: int
    sources: tuple[str, ...] = ()  # endpoints it is pulling from now


@dataclass(frozen=True, slots=True)
class TransferReport:
    """One receiver on one sender, since its last report on it.

    `done`: all chunks are here. `moved`: bytes came, or the sources changed. `stalled`: no byte for
    three times the expected time of a chunk. `slow`: chunks take longer than that. `failed`: the
    connection ended or was refused. `damaged`: bytes that do not fit their digest.
    """

    worker_id: str
    version: int
    endpoint: str
    event: Event
    num_bytes: int = 0  # of the snapshot
    wire_bytes: int = 0  # that they took on the way
    busy_s: float = 0.0  # in which bytes came, without waiting for what the sender had not
    latency_s: float = 0.0  # from the request to the first byte; 0: not measured
    num_ready: int = 0  # chunks the receiver has now, from anywhere
    num_chunks: int = 0
    base_version: int = -1  # the bytes were differences against it
    detail: str = ""
