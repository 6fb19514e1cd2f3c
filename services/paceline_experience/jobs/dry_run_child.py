"""Tries plug-ins of jobs, in forks: `python -m paceline_experience.jobs.dry_run_child BYTES`."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import sys
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from paceline.platform.program import importing

# Each fork would walk, and so copy, all that was imported.
with importing():
    from paceline.config import JobSpec
    from paceline.data import JobData
    from paceline.data.errors import answer_of
    from paceline.errors import InvalidError, UnavailableError
    from paceline.isolation.child import ServedCall, serve
    from paceline.platform.parent import PARENT_CHECK_S, end_with_parent
    from paceline.plugins import registry
    from paceline_experience.ledger.sources import try_plugins

_FORKS: Final = multiprocessing.get_context("fork")


def main() -> None:
    """Serve `ready` after the imports, and `try` with what is wrong with a job.

    It is tried in a fork of this process, so that no job waits for imports or inherits what another
    leaked; if that has ended without an answer, its exit code is one.
    """
    num_bytes, parent = int(sys.argv[1]), os.getppid()
    registry.installed("advantages")  # reads all descriptors, which each fork would do again
    serve({"ready": _ready, "try": partial(_forked, num_bytes, parent)})


def _ready(call: ServedCall) -> None:
    del call


def _forked(num_bytes: int, parent: int, call: ServedCall) -> dict[str, Any]:
    answers, sink = _FORKS.Pipe(duplex=False)
    process = _FORKS.Process(target=_try, args=(call.fields, sink, num_bytes))
    process.start()
    sink.close()
    with answers:
        while not answers.poll(PARENT_CHECK_S) and process.is_alive():
            if os.getppid() != parent:
                process.kill()
                os._exit(1)
        try:
            wrong = json.loads(answers.recv_bytes()) if answers.poll() else None
        except EOFError:
            wrong = None
    if wrong is not None:
        process.kill()  # it may have left threads that never end
    process.join()
    return {"exit_code": process.exitcode} if wrong is None else {"wrong": wrong}


def _try(request: Mapping[str, Any], sink: Connection, num_bytes: int) -> None:
    end_with_parent()
    _limit_memory(num_bytes)
    sink.send_bytes(json.dumps(attempt(request)).encode())


def attempt(request: Mapping[str, Any]) -> list[str]:
    """What is wrong with the plug-ins of a job, as `answer_of`; empty: nothing."""
    try:
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
