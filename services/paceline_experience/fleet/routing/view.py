"""The view of a broadcast that `paceline weights JOB` shows."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.types import PolicyVersion
from paceline.weights.route import ChunkSource, RouteShape, TransferProgress


@dataclass(frozen=True, slots=True)
class RoutedVersion:
    """A version and how it is distributed."""

    version: PolicyVersion
    chunk_bytes: int
    shape: RouteShape
    predicted_s: float  # until the last worker has it
    ratio: float  # wire bytes per snapshot byte when sent as differences, moving average


@dataclass(frozen=True, slots=True)
class RoutedHolder:
    """A seed or a worker, with what it holds."""

    worker_id: str  # seeds: empty
    site: str
    endpoint: str
    transfers: tuple[TransferProgress, ...] = ()  # newest first
    sources: tuple[ChunkSource, ...] = ()  # for its target version
    bytes_per_s: float = 0.0  # measured from its first source; 0: not yet
    trouble: str = ""  # why others do not pull from it; empty: they may


@dataclass(frozen=True, slots=True)
class BroadcastView:
    """Where a job's weights are at present."""

    versions: tuple[RoutedVersion, ...]  # newest first
    holders: tuple[RoutedHolder, ...]  # seeds first, then workers by id
