"""Checks of a job that services make when it is submitted, made on this machine before that.

Each service that checks jobs has a module with a coroutine function `check`, which does so without
a store or other services. It runs in a process of its own, a fork of this one, whose imports it
need not repeat.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

from paceline.config import JobSpec
from paceline.errors import InvalidError, UnavailableError
from paceline.plugins.allowed import AllowedTargets

MODULES = ("paceline_gateway.submit.here", "paceline_experience.jobs.submit.here")
TIMEOUT_S = 30.0  # what is not checked by then is checked at submit
_FORKS: Final = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True)
class Findings:
    """Problems of a job, and the checks that could not run here, with reasons."""

    wrong: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        """All problems, each once."""
        return "; ".join(dict.fromkeys(self.wrong))

    def __add__(self, other: Findings) -> Findings:
        return Findings(self.wrong + other.wrong, self.unchecked + other.unchecked)


Check = Callable[[JobSpec, AllowedTargets], Awaitable[Findings]]


def findings(
    spec: JobSpec,
    allowed: AllowedTargets,
    *,
    modules: Sequence[str] = MODULES,
    timeout_s: float = TIMEOUT_S,
) -> Findings:
    """The findings of these modules about a job whose files lie on this machine.

    `allowed`: functions of installed modules that it may name. What is not there after `timeout_s`
    counts as unchecked.
    """
    deadline = time.monotonic() + timeout_s
    combined = Findings()
    # Outlives children that are killed, so that nothing of theirs does.
    with tempfile.TemporaryDirectory(prefix="paceline-checks-", ignore_cleanup_errors=True) as own:
        Path(own).chmod(0o755)  # programs in the sandbox may have another user
        for process, answers in [_started(module, spec, allowed, own) for module in modules]:
            with answers:
                if answers.poll(max(0.0, deadline - time.monotonic())):
                    combined += _read(answers, process)
                else:
                    combined += _late(f"did not end within {timeout_s:g} s")
            process.kill()
            process.join()
    return combined


def _started(
    module: str, spec: JobSpec, allowed: AllowedTargets, folder: str
) -> tuple[BaseProcess, Connection]:
    ours, theirs = _FORKS.Pipe(duplex=False)
    process = _FORKS.Process(target=_answer, args=(module, spec, allowed, folder, theirs))
    process.start()
    theirs.close()
    return process, ours


def _answer(
    module: str, spec: JobSpec, allowed: AllowedTargets, folder: str, sink: Connection
) -> None:
    """In the child: check, without a word from what is imported."""
    tempfile.tempdir = folder
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    try:
        check: Check = importlib.import_module(module).check
        result = asyncio.run(_checked(check, spec, allowed))
    except ModuleNotFoundError as error:
        result = _late(f"need {error.name}; pip install 'paceline[local]'")
    sink.send_bytes(json.dumps(asdict(result)).encode())


async def _checked(check: Check, spec: JobSpec, allowed: AllowedTargets) -> Findings:
    try:
        return await check(spec, allowed)
    except UnavailableError as error:
        return Findings(unchecked=(error.message,))
    except InvalidError as error:
        return Findings(wrong=(error.message,))


def _read(answers: Connection, process: BaseProcess) -> Findings:
    try:
        fields = json.loads(answers.recv_bytes())
    except EOFError:
        process.join()
        return _late(f"have ended with {process.exitcode}")
    return Findings(**{name: tuple(lines) for name, lines in fields.items()})


def _late(why: str) -> Findings:
    return Findings(unchecked=(f"some checks {why}",))
