"""Snapshots of model weights: how they are laid out, staged, served and pulled. Knows no torch."""

from paceline.weights.chunks import Staging
from paceline.weights.manifest import Header, TensorEntry, choose_chunk_bytes, plan
from paceline.weights.peer import WeightServer, pull

__all__ = [
    "Header",
    "Staging",
    "TensorEntry",
    "WeightServer",
    "choose_chunk_bytes",
    "plan",
    "pull",
]
