"""Times as Kubernetes writes them."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_since(text: str) -> float:
    """How long ago a time of `now` was, or one with fractions of a second."""
    return (datetime.now(UTC) - datetime.fromisoformat(text.replace("Z", "+00:00"))).total_seconds()
