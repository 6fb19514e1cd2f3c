"""Snapshots of model weights: how they are laid out, staged, served and pulled. Knows no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.weights.manifest import Header, TensorEntry, choose_chunk_bytes, plan
    from paceline.weights.receiver import Receiver
    from paceline.weights.server import WeightServer
    from paceline.weights.staging import Staging
    from paceline.weights.transfer import Transfer, pull

__all__ = [
    "Header",
    "Receiver",
    "Staging",
    "TensorEntry",
    "Transfer",
    "WeightServer",
    "choose_chunk_bytes",
    "plan",
    "pull",
]

_WHERE = {
    "Header": "manifest",
    "Receiver": "receiver",
    "Staging": "staging",
    "TensorEntry": "manifest",
    "Transfer": "transfer",
    "WeightServer": "server",
    "choose_chunk_bytes": "manifest",
    "plan": "manifest",
    "pull": "transfer",
}


# The light services use nouns and routes, and have none of what moves the bytes installed.
def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
