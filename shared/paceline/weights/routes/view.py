"""What `paceline weights JOB` shows of a broadcast."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.types import PolicyVersion
from paceline.weights.route import Source, TransferProgress


@dataclass(frozen=True, slots=True)
class Version:
    """A version and how it spreads."""

    version: PolicyVersion
    chunk_bytes: int
    shape: str  # unicast, chain, tree, sites
    predicted_s: float  # until the last worker has it
    ratio: float  # wire bytes by snapshot bytes of differences, moving average


@dataclass(frozen=True, slots=True)
class Holder:
    """A seed or a worker."""

    worker_id: str  # seeds: empty
    site: str
    endpoint: str
    transfers: tuple[TransferProgress, ...] = ()  # newest first
    sources: tuple[Source, ...] = ()  # of the version it is to have
    bytes_per_s: float = 0.0  # measured from its first source; 0: not yet
    trouble: str = ""  # why others do not pull from it; empty: none


@dataclass(frozen=True, slots=True)
class View:
    """A job's weights at a moment."""

    versions: tuple[Version, ...]  # newest first
    holders: tuple[Holder, ...]  # seeds first, then workers by id
