"""Why packages are not fetched."""

from __future__ import annotations

from paceline.errors import UnavailableError


class FetchError(UnavailableError):
    """The wheels that requirements ask for cannot be had, or not together."""
