"""`paceline replay`: trajectories for the replay of a job."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from paceline.cli.entry import Exit
from paceline.cli.remote import client_of
from paceline.errors import ConfigError

MAX_ROWS, MAX_CHARS = 256, 256 << 10  # of one request
_LINE = re.compile(r"^line (\d+)")


def add(arguments: Namespace) -> int:
    """`paceline replay import ID FILE`."""
    path: Path = arguments.file
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    num_stored = num_refused = 0
    with client_of(arguments) as client:
        for numbers, lines in batches(path):
            found = client.import_episodes(arguments.job, lines="\n".join(lines))
            num_stored += found.num_stored
            num_refused += found.num_refused
            for problem in found.problems:
                print(f"{path}: {_renumbered(problem, numbers)}", file=sys.stderr)
    print(f"{num_stored} stored, {num_refused} refused")
    return Exit.INPUT if num_refused else Exit.OK


def batches(path: Path) -> Iterator[tuple[list[int], list[str]]]:
    """Lines of a file with their numbers from 1, as many as a request takes; blank ones left out.

    Raises:
        ConfigError: the file is no text.
    """
    numbers: list[int] = []
    lines: list[str] = []
    size = 0
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                if lines and (len(lines) == MAX_ROWS or size + len(line) > MAX_CHARS):
                    yield numbers, lines
                    numbers, lines, size = [], [], 0
                numbers.append(number)
                lines.append(line.strip())
                size += len(line)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: no UTF-8 text: {error}") from None
    if lines:
        yield numbers, lines


def _renumbered(problem: str, numbers: list[int]) -> str:
    """With the line's number in the file instead of the request."""
    return _LINE.sub(lambda found: f"line {numbers[int(found[1]) - 1]}", problem)
