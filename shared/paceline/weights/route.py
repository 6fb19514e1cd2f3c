"""Routes: the sources that a worker pulls a version from, and its reports on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from paceline.errors import InvalidError
from paceline.types import PolicyVersion


class TransferEvent(StrEnum):
    """What a receiver reports about a sender."""

    DONE = "done"  # all chunks received
    MOVED = "moved"  # bytes arrived, or the sources changed
    STALLED = "stalled"  # no byte for three times the expected time of a chunk
    SLOW = "slow"  # chunks take longer than that
    FAILED = "failed"  # the connection ended or was refused
    DAMAGED = "damaged"  # bytes did not match their digest


class RouteShape(StrEnum):
    """How a version is broadcast."""

    UNICAST = "unicast"  # all workers pull from the trainer
    CHAIN = "chain"
    TREE = "tree"
    SITES = "sites"  # one worker of each site pulls from another site


QUIET_EVENTS = frozenset({TransferEvent.DONE, TransferEvent.MOVED})
"""Events that report no problem."""


@dataclass(frozen=True, slots=True)
class ChunkSource:
    """A peer and its share of the chunks: those with `index % parts == part`.

    Part 0 of 0 means all chunks. Raises `InvalidError` for an invalid part.
    """

    endpoint: str  # http://host:port
    part: int = 0
    parts: int = 1

    def __post_init__(self) -> None:
        """Check the part."""
        if not 0 <= self.part < max(self.parts, 1):
            text = f"part: {self.part} of {self.parts} is invalid; 0 <= part < parts is allowed"
            raise InvalidError(text)
        object.__setattr__(self, "parts", max(self.parts, 1))


@dataclass(frozen=True, slots=True)
class Route:
    """Pull `version` from all `sources` in parallel, and what one fails to send from a fallback."""

    version: PolicyVersion
    sources: tuple[ChunkSource, ...]
    fallbacks: tuple[str, ...] = ()  # endpoints, best first
    bytes_per_s: float = 0.0  # expected total of all sources; 0: unknown
    base_version: int = -1  # request deltas against it if held completely; -1: never
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """Progress of a worker on one version."""

    version: int
    num_ready: int  # chunks verified
    num_chunks: int
    sources: tuple[str, ...] = ()  # endpoints of the current streams


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What a receiver got from one sender since its last report on it."""

    worker_id: str
    version: int
    endpoint: str
    event: TransferEvent
    num_bytes: int = 0  # of the snapshot
    wire_bytes: int = 0  # bytes on the wire
    busy_s: float = 0.0  # receiving, without waits for chunks that the sender did not have yet
    latency_s: float = 0.0  # from the request to the first byte; 0: not measured
    num_ready: int = 0  # chunks the receiver has now, from all senders
    num_chunks: int = 0
    base_version: int = -1  # base of the deltas received; -1: none
    detail: str = ""
