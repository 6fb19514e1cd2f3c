"""Has JSON of models parsed in a short-lived process: users write it, and services are shared.

Python needs 25 times the size of JSON for its objects, and answers nobody else while it makes them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from paceline.errors import PacelineError

_CHILD = Path(__file__).with_name("parse_child.py")
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
    head = json.dumps({"what": what, "sizes": [len(each) for each in pieces]}).encode()
    command = [sys.executable, "-I", "-S", str(_CHILD)]
    try:
        done = subprocess.run(
            command,
            input=b"".join((head, b"\n", *pieces)),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
            check=True,
        )
        answer: dict[str, Any] = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError):
        raise ParseError("takes too long, or too much memory, to parse") from None
    if "wrong" in answer:
        raise ParseError(str(answer["wrong"]), int(answer["at"]))
    return answer["value"]
