"""`paceline pause`, `resume`, `fork` and `delete`."""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any, cast

from paceline.config.documents import read_yaml
from paceline.enums import JobState
from paceline.errors import DeadlineError, InvalidError, NotFoundError
from paceline.front.cli.check import override
from paceline.front.cli.entry import Exit
from paceline.front.cli.progress import follow
from paceline.front.cli.remote import verdict
from paceline.front.cli.target.clients import client_of
from paceline.front.cli.terminal.printing import say
from paceline.front.client.client import Client

POLL_S = 0.5


def pause(arguments: Namespace) -> int:
    """`paceline pause ID`."""
    with client_of(arguments) as client:
        status = client.pause(arguments.job, reason=arguments.reason).status
        deadline = time.monotonic() + arguments.timeout
        while status.state is JobState.PAUSING and not arguments.no_wait:
            _wait(deadline, f"job {arguments.job} is still pausing: its trainer has not ended")
            status = client.get(arguments.job).status
    say(f"{status.job_id}: {status.state}")
    return Exit.OK if arguments.no_wait or status.state is JobState.PAUSED else Exit.JOB


def resume(arguments: Namespace) -> int:
    """`paceline resume ID`."""
    with client_of(arguments) as client:
        status = client.resume(arguments.job, reason=arguments.reason).status
    say(f"{status.job_id}: {status.state}")
    return Exit.OK


def fork(arguments: Namespace) -> int:
    """`paceline fork ID`."""
    step = "latest" if arguments.which is None else arguments.which
    changes: Any = {}
    if arguments.file is not None:
        changes = read_yaml(arguments.file.read_text(), what=str(arguments.file))
    with client_of(arguments) as client:
        spec = merged(client.get(arguments.job).spec, changes)
        for field, value in map(override, arguments.overrides):
            spec = merged(spec, nested(field, value))
        job = client.submit(spec | {"fork": {"job": arguments.job, "step": step}})
        say(job.status.job_id)
        if not arguments.watch:
            return Exit.OK
        return verdict(follow(client, job.status.job_id, quiet=False))


def merged(spec: dict[str, Any], changes: Any) -> dict[str, Any]:
    """A job file with changes, section by section; lists are replaced."""
    if not isinstance(changes, dict):
        raise InvalidError("-f: a mapping of fields is needed")
    result = dict(spec)
    for name, value in cast(dict[str, Any], changes).items():
        before = result.get(name)
        both = isinstance(before, dict) and isinstance(value, dict)
        result[name] = merged(cast(dict[str, Any], before), value) if both else value
    return result


def nested(field: str, value: Any) -> dict[str, Any]:
    """A dotted path as nested mappings."""
    *sections, last = field.split(".")
    result: dict[str, Any] = {last: value}
    for name in reversed(sections):
        result = {name: result}
    return result


def delete(arguments: Namespace) -> int:
    """`paceline delete ID...`."""
    with client_of(arguments) as client:
        for job_id in arguments.jobs:
            _delete(client, job_id, arguments)
    return Exit.OK


def _delete(client: Client, job_id: str, arguments: Namespace) -> None:
    deleted = client.delete(job_id, force=arguments.force).deleted
    deadline = time.monotonic() + arguments.timeout
    while not deleted and not arguments.no_wait:
        _wait(deadline, f"job {job_id} is not deleted yet; that goes on without this command")
        try:
            deleted = client.delete(job_id, force=arguments.force).deleted
        except NotFoundError:
            deleted = True
    say(f"{job_id}: {'deleted' if deleted else 'being deleted'}")


def _wait(deadline: float, problem: str) -> None:
    if time.monotonic() >= deadline:
        raise DeadlineError(problem)
    time.sleep(POLL_S)
