"""How much of a download has arrived."""

from __future__ import annotations

from collections.abc import Callable

Arrived = Callable[[float, float], object]
"""Called with the bytes that have arrived, and those of all files; 0: unknown."""


def unheard(done: float, total: float) -> None:
    """For a download that nobody watches."""
