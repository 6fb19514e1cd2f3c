"""A reward that leaves a file where its option says."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def score(item: Any, *, path: str) -> float:
    """Always 1."""
    del item
    Path(path).touch()
    return 1.0


sibling = score
