"""Clients of commands: of a gateway, or of what a run directory has stored."""

from __future__ import annotations

import os
import signal
from argparse import Namespace
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import ConfigError, UnavailableError
from paceline.errors.extras import EVERYTHING, not_installed
from paceline.front.api.documents import JobEvent, JobView
from paceline.front.cli.target.run_dirs import (
    DEFAULT_RUN_DIR,
    VARIABLE,
    last_run,
    live_url,
    named_run_dir,
)
from paceline.front.cli.terminal.printing import say
from paceline.front.client.client import Client
from paceline.platform.files import read_json, token_of

DEFAULT_URL = "http://127.0.0.1:8300"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class CommandTarget:
    """The target of a command: a gateway at `url`, or only the store in `run_dir`."""

    url: str = ""
    run_dir: Path | None = None  # whose token is for the gateway; None: it is not of a directory
    is_remembered: bool = False  # nobody named the run directory: it is the last one


class StoredClient(Client):
    """A client of what a run directory has stored: nothing in it goes on."""

    def __init__(self, url: str, *, token: str, run_dir: Path) -> None:
        super().__init__(url, token=token)
        self._run_dir = run_dir

    def watch(self, job_id: str) -> Iterator[JobEvent]:
        """The last event of a job that is over; raises as `check_over`."""
        self.check_over(job_id)
        yield from super().watch(job_id)

    def wait(self, job_id: str, *, timeout_s: float | None = None) -> JobView:
        """A job that is over; raises as `check_over`."""
        self.check_over(job_id)
        return super().wait(job_id, timeout_s=timeout_s)

    def check_over(self, job_id: str) -> None:
        """Raise `UnavailableError` if a job is not over: there is nothing to follow."""
        status = self.get(job_id).status
        if not status.state.terminal:
            raise UnavailableError(
                f"job {job_id} is {status.state} at step {status.step}, and nothing runs in "
                f"{self._run_dir}; `paceline run JOB.yaml --run-dir {self._run_dir}` goes on with "
                "the same job file"
            )


def client_of(arguments: Namespace) -> Client:
    """A client of a running gateway: that of `target_of`, else the one at the usual port.

    Raises:
        UnavailableError: a run directory is named in which no gateway runs. One that listens at the
            usual port may be another's, and the token of a run directory is not for it.
    """
    target = target_of(arguments)
    if target.url:
        _tell(target)
        return _client(arguments, target)
    if (named := named_run_dir(arguments)) is None:
        return _client(arguments, CommandTarget(DEFAULT_URL))
    how = "--run-dir" if arguments.run_dir else VARIABLE
    raise UnavailableError(
        f"{how} {named}: no gateway runs there; start one with "
        f"`paceline up --run-dir {named}`, or name another with --url"
    )


@contextmanager
def reader_of(arguments: Namespace) -> Generator[Client]:
    """A client for a command that only reads; of what is stored where no gateway runs.

    Raises:
        UnavailableError: as for `client_of`, if nothing is stored in the run directory.
    """
    target = target_of(arguments)
    if target.url or target.run_dir is None:
        with client_of(arguments) as client:
            yield client
        return
    _tell(target)
    try:
        from paceline.front.local.stored import served
    except ModuleNotFoundError as error:
        what = not_installed(error, extra=EVERYTHING)
        problem = f"nothing runs in {target.run_dir}; to read what is stored: {what}"
        raise ConfigError(problem) from None
    with ExitStack() as stack:
        for number in _SIGNALS:
            stack.callback(signal.signal, number, signal.getsignal(number))
        local = stack.enter_context(served(target.run_dir))
        # Interrupted while they stop, services would be left behind.
        for number in _SIGNALS:
            stack.callback(signal.signal, number, signal.SIG_IGN)
        yield stack.enter_context(
            StoredClient(local.url, token=local.token, run_dir=target.run_dir)
        )


def target_of(arguments: Namespace) -> CommandTarget:
    """The target of a command, by the first of these that exists.

    `--url`; `--run-dir`; `PACELINE_URL`; `PACELINE_RUN_DIR`; the gateway of `runs/local`; with a
    token named, the gateway at the usual port; the run directory of the last `run` or `up`;
    `runs/local`. Empty if there is none.
    """
    if url := named_url(arguments):
        return CommandTarget(url)
    if (named := named_run_dir(arguments)) is not None:
        return _target_in(named)
    if live_url(DEFAULT_RUN_DIR):
        return _target_in(DEFAULT_RUN_DIR)
    if arguments.token_file or os.environ.get("PACELINE_TOKEN"):
        return CommandTarget(DEFAULT_URL)
    last = last_run()
    target = _target_in(last) if last is not None else CommandTarget()
    if target == CommandTarget():
        return _target_in(DEFAULT_RUN_DIR)
    return replace(target, is_remembered=True)


def named_url(arguments: Namespace) -> str:
    """The URL of `--url`, else of `PACELINE_URL` unless `--run-dir` is given; empty if neither."""
    return arguments.url or ("" if arguments.run_dir else os.environ.get("PACELINE_URL", ""))


def _tell(target: CommandTarget) -> None:
    if target.is_remembered:
        say(f"in {target.run_dir}, the last run directory", error=True)


def _target_in(run_dir: Path) -> CommandTarget:
    """The gateway of a run directory, else what is stored there, else nothing."""
    if url := live_url(run_dir):
        return CommandTarget(url, run_dir)
    if (run_dir / "store").is_dir():
        return CommandTarget(run_dir=run_dir)
    # Where the store is elsewhere, the address may be one that answers again.
    note = read_json(run_dir / "gateway.json") or {}
    return CommandTarget(note["http"], run_dir) if "http" in note else CommandTarget()


def _client(arguments: Namespace, target: CommandTarget) -> Client:
    token = _token(arguments.token_file, target.run_dir)
    return Client(target.url, token=token, ca=_authorities(arguments.ca))


def _token(path: Path | None, run_dir: Path | None) -> str:
    """Read the API token from a file, the environment, or the gateway's run directory.

    There is no option for the token itself: every user of the machine can see arguments.
    """
    if path is None:
        token = os.environ.get("PACELINE_TOKEN", "")
        return token or (token_of(run_dir) if run_dir is not None else "")
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"--token-file {path}: {error.strerror}") from None


def _authorities(path: Path | None) -> Path | None:
    if path is not None and not path.is_file():
        raise ConfigError(f"--ca {path}: no such file")
    return path
