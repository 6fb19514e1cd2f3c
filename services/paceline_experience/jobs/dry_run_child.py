"""Tries plug-ins of jobs: `python -m paceline_experience.jobs.dry_run_child BYTES`."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import sys
from pathlib import Path
from typing import Final, TextIO

from paceline.program import importing

# Each fork would walk, and so copy, all that was imported.
with importing():
    from paceline.config import JobSpec
    from paceline.data import JobData
    from paceline.data.errors import answer_of
    from paceline.errors import InvalidError, UnavailableError
    from paceline.parent import PARENT_CHECK_S, end_with_parent
    from paceline.plugins import registry
    from paceline.server.child import take_pipes
    from paceline_experience.ledger.sources import try_plugins

_FORKS: Final = multiprocessing.get_context("fork")


def main() -> None:
    """Answer `ready` after the imports, then each job, a line, with a line.

    It says what is wrong with the job, or the exit code of the process that tried it: a fork of
    this one, so that no job waits for imports or inherits what another leaked.
    """
    source, sink = take_pipes()
    num_bytes, parent = int(sys.argv[1]), os.getppid()
    registry.installed("advantages")  # reads all descriptors, which each fork would do again
    _answer(sink, "ready")
    for line in source:
        process = _FORKS.Process(target=_try, args=(line, sink, num_bytes))
        process.start()
        while process.is_alive():
            process.join(PARENT_CHECK_S)
            if os.getppid() != parent:
                process.kill()
                return
        if process.exitcode:
            _answer(sink, process.exitcode)


def _try(line: str, sink: TextIO, num_bytes: int) -> None:
    end_with_parent()
    _limit_memory(num_bytes)
    _answer(sink, attempt(line))


def _answer(sink: TextIO, answer: str | list[str] | int) -> None:
    sink.write(json.dumps(answer) + "\n")
    sink.flush()


def attempt(line: str) -> list[str]:
    """What is wrong with the plug-ins of a job, as `answer_of`; empty: nothing."""
    try:
        request = json.loads(line)
        job = JobSpec.model_validate(request["job"])
        try_plugins(job, JobData.from_json(request["data"]))
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
