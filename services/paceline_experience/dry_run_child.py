"""The process that tries plug-ins of jobs: `python -m paceline_experience.dry_run_child BYTES`."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import TextIO

from paceline.child import end_with_parent, take_pipes
from paceline.config import JobSpec
from paceline.errors import InvalidError
from paceline_experience.sources import try_plugins

MOST_ERROR_CHARS = 2000


def main() -> None:
    """Say that the imports are done, then of each job, a line, what is wrong with it."""
    source, sink = take_pipes()
    end_with_parent()
    _limit_memory(int(sys.argv[1]))
    _say(sink, "ready")
    for line in source:
        _say(sink, attempt(line))


def _say(sink: TextIO, text: str) -> None:
    sink.write(json.dumps(text) + "\n")
    sink.flush()


def attempt(line: str) -> str:
    """What is wrong with the plug-ins of a job; empty if nothing is."""
    try:
        try_plugins(JobSpec.model_validate_json(line))
    except InvalidError as error:
        return error.message[:MOST_ERROR_CHARS] or "refused"
    return ""


def _limit_memory(num_bytes: int) -> None:
    """Beyond what the imports have taken, of address space; where the system tells and does so."""
    size = Path("/proc/self/statm")
    if not size.exists():
        return
    most = int(size.read_text().split()[0]) * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main()
