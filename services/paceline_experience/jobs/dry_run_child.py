"""Tries plug-ins of jobs: `python -m paceline_experience.jobs.dry_run_child BYTES`."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import TextIO

from paceline.config import JobSpec
from paceline.data import JobData
from paceline.data.errors import answer_of
from paceline.errors import InvalidError, UnavailableError
from paceline.parent import end_with_parent
from paceline.server.child import take_pipes
from paceline_experience.ledger.sources import try_plugins


def main() -> None:
    """Answer `ready` after the imports, then a line with what is wrong with each job, a line."""
    source, sink = take_pipes()
    end_with_parent()
    _limit_memory(int(sys.argv[1]))
    _answer(sink, "ready")
    for line in source:
        _answer(sink, attempt(line))


def _answer(sink: TextIO, answer: str | list[str]) -> None:
    sink.write(json.dumps(answer) + "\n")
    sink.flush()


def attempt(line: str) -> list[str]:
    """What is wrong with the plug-ins of a job, as `answer_of`; empty: nothing."""
    try:
        request = json.loads(line)
        data = JobData.from_json(request["data"]) if request["data"] is not None else None
        try_plugins(JobSpec.model_validate(request["job"]), data)
    except (InvalidError, UnavailableError) as error:
        return answer_of(error)
    return []


def _limit_memory(num_bytes: int) -> None:
    """Limit the address space to `num_bytes` beyond what the imports use, on Linux."""
    size = Path("/proc/self/statm")
    if not size.exists():
        return
    limit = int(size.read_text().split()[0]) * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
