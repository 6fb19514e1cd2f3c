"""Timestamps in the format of Kubernetes."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> str:
    """The current time in UTC, in seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_since(text: str) -> float:
    """Seconds since a timestamp, which may have fractions of a second."""
    return (datetime.now(UTC) - datetime.fromisoformat(text.replace("Z", "+00:00"))).total_seconds()
