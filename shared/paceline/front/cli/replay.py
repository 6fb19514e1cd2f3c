"""`paceline replay`: trajectories for the replay of a job."""

from __future__ import annotations

import json
import re
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import BinaryIO

from paceline.config.quota import MAX_SPEC_BYTES
from paceline.errors import ConfigError, DeadlineError, InvalidError, UnavailableError
from paceline.front.api.documents import ImportView
from paceline.front.cli.entry import Exit
from paceline.front.cli.target.clients import client_of
from paceline.front.cli.terminal.printing import say
from paceline.front.client.client import Client

MAX_ROWS, MAX_BYTES = 256, 256 << 10  # of one request, as JSON
MAX_LINE_BYTES = MAX_SPEC_BYTES - 64  # what a request takes, without the names around a line
_OUTAGE_S, _PAUSE_S = 300.0, 2.0
_PART = 1 << 20
_LINE = re.compile(r"^line (\d+)")


@dataclass(slots=True)
class RequestLines:
    """Lines for one request, with their numbers from 1, and what is wrong with others."""

    numbers: list[int] = field(default_factory=list[int])
    lines: list[str] = field(default_factory=list[str])
    problems: list[str] = field(default_factory=list[str])

    def renumbered(self, problem: str) -> str:
        """A problem with the line's number in the file instead of the request."""
        return _LINE.sub(lambda match: f"line {self.numbers[int(match[1]) - 1]}", problem)


def add(arguments: Namespace) -> int:
    """`paceline replay import ID FILE`."""
    path: Path = arguments.file
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    num_stored = num_refused = 0
    with client_of(arguments) as client:
        for request in requests_of(path):
            num_refused += len(request.problems)
            if request.lines:
                stored = _sent(client, arguments.job, request)
                num_stored += stored.num_stored
                num_refused += stored.num_refused
                request.problems += map(request.renumbered, stored.problems)
            for problem in request.problems:
                say(f"{path}: {problem}", error=True)
    say(f"{num_stored} stored, {num_refused} refused")
    return Exit.INPUT if num_refused else Exit.OK


def requests_of(path: Path) -> Iterator[RequestLines]:
    """The lines of a file, as many as a request takes; blank ones are left out."""
    request, size = RequestLines(), 0
    with path.open("rb") as file:
        for number, data in _lines(file):
            try:
                line, num_bytes = _checked(data)
            except InvalidError as error:
                request.problems.append(f"line {number}: {error.message}")
                continue
            if not line:
                continue
            if request.lines and (len(request.lines) == MAX_ROWS or size + num_bytes > MAX_BYTES):
                yield request
                request, size = RequestLines(), 0
            request.numbers.append(number)
            request.lines.append(line)
            size += num_bytes
    yield request


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Number and content of each line; of one that is too long only its beginning."""
    for number in count(1):
        line = part = file.readline(MAX_LINE_BYTES + 2)
        while part and not part.endswith(b"\n"):
            part = file.readline(_PART)
        if not line:
            return
        yield number, line.rstrip(b"\r\n")


def _checked(data: bytes) -> tuple[str, int]:
    """The text of a line, and its size in a request.

    Raises:
        InvalidError: it cannot be sent.
    """
    too_long = f"is too long; at most {MAX_LINE_BYTES} bytes of JSON are allowed"
    if len(data) > MAX_LINE_BYTES:
        raise InvalidError(too_long)
    try:
        line = data.decode().strip()
    except UnicodeDecodeError as error:
        raise InvalidError(f"is not UTF-8 at byte {error.start}") from None
    if (num_bytes := len(json.dumps(line))) > MAX_LINE_BYTES:
        raise InvalidError(too_long)
    return line, num_bytes


def _sent(client: Client, job_id: str, request: RequestLines) -> ImportView:
    """Send lines, again while the service has to look for their tasks or is away."""
    end, is_told = time.monotonic() + _OUTAGE_S, False
    while True:
        try:
            return client.import_episodes(job_id, lines="\n".join(request.lines))
        except (UnavailableError, DeadlineError) as error:
            if time.monotonic() > end:
                raise
            if not is_told:
                say(f"waiting: {error.message}", error=True)
            is_told = True
        time.sleep(_PAUSE_S)
