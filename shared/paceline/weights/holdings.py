"""Who has which weights, as users are shown it; no key is in it."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.types import PolicyVersion
from paceline.weights.route import Source, TransferProgress


@dataclass(frozen=True, slots=True)
class Published:
    """A version and how it goes out."""

    version: PolicyVersion
    chunk_bytes: int = 0
    shape: str = ""  # of the route: unicast, chain, tree, sites
    predicted_s: float = 0.0  # until the last worker has it
    ratio: float = 0.0  # wire bytes by snapshot bytes, as seen last; 0: not seen


@dataclass(frozen=True, slots=True)
class Holder:
    """A seed or a worker, what it has and whom it pulls from."""

    worker_id: str  # empty for seeds of the trainer
    kind: str
    site: str
    endpoint: str
    active_version: int = -1
    transfers: tuple[TransferProgress, ...] = ()
    sources: tuple[Source, ...] = ()  # of the newest version
    bytes_per_s: float = 0.0  # measured from its first source; 0: not yet
    trouble: str = ""  # why others do not pull from it now; empty: none


@dataclass(frozen=True, slots=True)
class Holdings:
    """All of one job: versions newest first; seeds first, then workers by id."""

    versions: tuple[Published, ...] = ()
    holders: tuple[Holder, ...] = ()
