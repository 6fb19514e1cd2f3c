"""One call to a process that lives no longer."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from paceline.errors import PacelineError
from paceline.isolation.calls import CallError, Calls, EndedError, answer_of
from paceline.isolation.child import ID, OP
from paceline.isolation.frames import MAX_JSON_BYTES, Frame, FrameError, frame
from paceline.isolation.process import ChildProcess
from paceline.isolation.reading import message_of

_LOOK_S = 0.25  # whether a call that blocks is still wanted
_NOTHING: Mapping[str, Any] = {}


class StoppedError(PacelineError):
    """A call that blocked was given up, as `stopped` was set."""


async def call_once(
    process: ChildProcess,
    op: str,
    fields: Mapping[str, Any] = _NOTHING,
    *,
    most_bytes: int = MAX_JSON_BYTES,
) -> Frame:
    """The answer of a process, which is killed then.

    Raises:
        CallError: the function has raised.
        EndedError: the process has ended without an answer.
    """
    calls = Calls(process, most_bytes=most_bytes)
    try:
        return await calls.call(op, fields)
    finally:
        await calls.kill()


def wait_once(
    command: Sequence[str],
    op: str,
    fields: Mapping[str, Any] = _NOTHING,
    parts: Mapping[str, Any] = _NOTHING,
    *,
    timeout_s: float,
    stopped: threading.Event | None = None,
    stderr: int | IO[bytes] | None = None,
) -> Frame:
    """`call_once` for threads: start a command, and block until it has answered and ended.

    Raises:
        CallError: the function has raised.
        EndedError: the process has ended without an answer.
        TimeoutError: it took longer than `timeout_s`.
        StoppedError: `stopped` was set meanwhile.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
    ) as child:
        try:
            data = _answer(child, frame({ID: 0, OP: op, **fields}, parts), timeout_s, stopped)
        finally:
            if child.poll() is None:
                child.kill()
    try:
        answer = answer_of(message_of(data))
    except FrameError as error:
        how = f"exit code {child.returncode}"
        raise EndedError(f"{error.message} ({how})", how) from None
    if isinstance(answer, CallError):
        raise answer
    return answer


def _answer(
    child: subprocess.Popen[bytes],
    request: bytes,
    timeout_s: float,
    stopped: threading.Event | None,
) -> bytes:
    unsent: bytes | None = request
    deadline = time.monotonic() + timeout_s
    while stopped is None or not stopped.is_set():
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        wait_s = left if stopped is None else min(left, _LOOK_S)
        try:
            return child.communicate(unsent, timeout=wait_s)[0]
        except subprocess.TimeoutExpired:
            unsent = None
    raise StoppedError("it is given up")
