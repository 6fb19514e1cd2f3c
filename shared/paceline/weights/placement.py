"""Which worker holds which weights, as shown to users; contains no keys."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.enums import WorkerKind
from paceline.types import PolicyVersion
from paceline.weights.route import ChunkSource, RouteShape, TransferProgress


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """A version and how it is broadcast."""

    version: PolicyVersion
    chunk_bytes: int = 0
    shape: RouteShape | None = None
    predicted_s: float = 0.0  # until the last worker has it
    ratio: float = 0.0  # wire bytes / snapshot bytes, last measured; 0: unknown


@dataclass(frozen=True, slots=True)
class WeightHolder:
    """A seeder or worker, the versions it holds, and the sources it pulls from."""

    worker_id: str  # empty for seeders of the trainer
    kind: WorkerKind
    site: str
    endpoint: str
    active_version: int = -1
    transfers: tuple[TransferProgress, ...] = ()
    sources: tuple[ChunkSource, ...] = ()  # of the newest version
    bytes_per_s: float = 0.0  # measured from its first source; 0: unknown
    trouble: str = ""  # why others do not pull from it, or what it refuses


@dataclass(frozen=True, slots=True)
class WeightPlacement:
    """The placement of one job: versions, newest first; seeders, then workers by id."""

    versions: tuple[PublishedVersion, ...] = ()
    holders: tuple[WeightHolder, ...] = ()
