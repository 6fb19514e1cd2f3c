"""Has JSON of models parsed in a short-lived process: users write it, and services are shared.

Python needs 25 times the size of JSON for its objects, and answers nobody else while it makes them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from paceline.errors import PacelineError
from paceline.isolation.calls import CallError, EndedError
from paceline.isolation.once import wait_once
from paceline.isolation.process import bare_command

_MODULE = "paceline.models.parse_child"
_FOLDER = Path(__file__).parents[2]
_TIMEOUT_S = 40.0  # of CPU time it has 20 seconds


class ParseError(PacelineError):
    """A piece cannot be parsed; `at` is its number, None if none can be blamed."""

    def __init__(self, message: str, at: int | None = None) -> None:
        super().__init__(message)
        self.at = at


def parse(
    what: Literal["names", "headers", "vocabulary", "declared"], pieces: Sequence[bytes]
) -> Any:
    """What `parse_child` finds in pieces of JSON; blocks without holding up other threads.

    Raises:
        ParseError: one is not as it should be, or needs too much memory or time.
    """
    parts = {str(at): piece for at, piece in enumerate(pieces)}
    try:
        answer = wait_once(
            bare_command(_MODULE, _FOLDER),
            what,
            parts=parts,
            timeout_s=_TIMEOUT_S,
            stderr=subprocess.DEVNULL,
        ).fields
    except (TimeoutError, EndedError, CallError):
        raise ParseError("takes too long, or too much memory, to parse") from None
    if "wrong" in answer:
        raise ParseError(str(answer["wrong"]), int(answer["at"]))
    return answer["value"]
