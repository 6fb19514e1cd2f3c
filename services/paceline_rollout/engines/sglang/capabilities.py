"""Features of an SGLang release, by the version that its server reports."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.errors import InvalidError

Release = tuple[int, int, int]
OLDEST: Release = (0, 5, 6)
NEWEST_READ: Release = (0, 5, 23)
_NUMBERS = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Features of a server. A version that cannot be parsed counts as the newest known one."""

    release: Release

    @property
    def sessions(self) -> bool:
        """Weight updates are framed by begin and end."""
        return self.release >= (0, 5, 21)

    @property
    def spans(self) -> bool:
        """Answers report which version sampled each output token."""
        return self.release >= (0, 5, 20)

    @property
    def incremental(self) -> bool:
        """Servers can stream only new tokens instead of all so far."""
        return self.release >= (0, 5, 22)


def parse_version(text: str) -> Capabilities:
    """The capabilities of a version such as `0.5.23` or `0.5.21.post1`.

    Raises:
        InvalidError: it is older than the oldest supported release.
    """
    found = _NUMBERS.match(text.strip())
    release = NEWEST_READ if found is None else _release(found)
    if release < (0, 1, 0):  # a build from a checkout calls itself 0.0.0
        release = NEWEST_READ
    if release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise InvalidError(f"sglang: version {text}; allowed: {oldest} or newer")
    return Capabilities(release)


def _release(found: re.Match[str]) -> Release:
    major, minor, patch = found.groups(default="0")
    return int(major), int(minor), int(patch)
