"""Checks of a job that services make when it is submitted, made on this machine before that.

Each service that checks jobs has a module that does so without a store or other services, in a
process of its own: it is given a `CheckRequest`, a line of JSON, and answers with `Findings`.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Self

from paceline.config import JobSpec
from paceline.errors import InvalidError, UnavailableError
from paceline.server.child import take_pipes

MODULES = ("paceline_gateway.submit.here", "paceline_experience.jobs.checks.here")
TIMEOUT_S = 30.0  # what is not checked by then is checked at submit


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """A job whose files lie on this machine."""

    job: dict[str, Any]
    allowed: Sequence[str] = ()
    """Functions of installed modules that it may name."""

    @property
    def spec(self) -> JobSpec:
        """The job."""
        return JobSpec.model_validate(self.job)


@dataclass(frozen=True, slots=True)
class Findings:
    """What is wrong with a job, and what could not be checked here and why."""

    wrong: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        """What is wrong, once."""
        return "; ".join(dict.fromkeys(self.wrong))

    def __add__(self, other: Findings) -> Findings:
        return Findings(self.wrong + other.wrong, self.unchecked + other.unchecked)


Check = Callable[[CheckRequest], Awaitable[Findings]]


def answer(check: Check) -> None:
    """In the process of a service: read a request, check it and write what was found."""
    source, sink = take_pipes()
    request = CheckRequest(**json.loads(source.readline()))
    json.dump(asdict(asyncio.run(_checked(check, request))), sink)
    sink.flush()


async def _checked(check: Check, request: CheckRequest) -> Findings:
    try:
        return await check(request)
    except UnavailableError as error:
        return Findings(unchecked=(error.message,))
    except InvalidError as error:
        return Findings(wrong=(error.message,))


class LocalChecks:
    """The processes that check jobs; they are started at once, and do their imports meanwhile."""

    def __init__(self, modules: Sequence[str] = MODULES) -> None:
        self._children = [_start(module) for module in modules]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End them."""
        for child in self._children:
            if child.poll() is None:
                child.kill()
            child.communicate()

    def findings(self, request: CheckRequest, *, timeout_s: float = TIMEOUT_S) -> Findings:
        """What they find in a job; each is asked once.

        What is not there after `timeout_s` counts as unchecked.
        """
        line = json.dumps(asdict(request)).encode() + b"\n"
        for child in self._children:
            assert child.stdin is not None
            with suppress(BrokenPipeError):  # it has ended, which is noticed when reading
                child.stdin.write(line)
                child.stdin.flush()
        found = [_answer_of(child, timeout_s) for child in self._children]
        return sum(found, Findings())


def _start(module: str) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-P", "-m", module]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)


def _answer_of(child: subprocess.Popen[bytes], timeout_s: float) -> Findings:
    try:
        out, told = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return Findings(unchecked=(f"the checks of this machine took more than {timeout_s:g} s",))
    try:
        return Findings(**{name: tuple(lines) for name, lines in json.loads(out).items()})
    except ValueError:
        last = told.decode(errors="replace").strip().rpartition("\n")[2]
        return Findings(unchecked=(f"a process that checks jobs has ended: {last}",))
