"""Snapshots of model weights: layout, staging, serving and pulling. Independent of torch.

A received chunk is read in `stream/chunk_reader.py` and checked in `snapshot/verification.py`.

Decisions: docs/decisions/weights.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.weights.snapshot.manifest import (
        SnapshotHeader,
        TensorEntry,
        choose_chunk_bytes,
        plan,
    )
    from paceline.weights.snapshot.staging import Staging
    from paceline.weights.transfer.http_transport import HttpTransport
    from paceline.weights.transfer.server import WeightServer
    from paceline.weights.transfer.version_receiver import Receiver
    from paceline.weights.transfer.version_transfer import Transfer, pull
    from paceline.weights.transport import TransportSettings

__all__ = [
    "HttpTransport",
    "Receiver",
    "SnapshotHeader",
    "Staging",
    "TensorEntry",
    "Transfer",
    "TransportSettings",
    "WeightServer",
    "choose_chunk_bytes",
    "plan",
    "pull",
]

_MODULES = {
    "HttpTransport": "transfer.http_transport",
    "SnapshotHeader": "snapshot.manifest",
    "Receiver": "transfer.version_receiver",
    "Staging": "snapshot.staging",
    "TensorEntry": "snapshot.manifest",
    "Transfer": "transfer.version_transfer",
    "TransportSettings": "transport",
    "WeightServer": "transfer.server",
    "choose_chunk_bytes": "snapshot.manifest",
    "plan": "snapshot.manifest",
    "pull": "transfer.version_transfer",
}


# Lazy: light services use only the data types and lack the dependencies of transfers.
def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
