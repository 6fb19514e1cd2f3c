"""Commands that call a gateway, and `logs`."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, cast

from paceline.enums import EXPLAINED, JobState
from paceline.errors import NotFoundError
from paceline.front.api.documents import JobView, ListedJob
from paceline.front.cli.check import read_job
from paceline.front.cli.entry import Exit
from paceline.front.cli.progress import follow, partial_eval
from paceline.front.cli.target.clients import client_of, reader_of
from paceline.front.cli.target.run_dirs import run_dir_of
from paceline.front.cli.terminal.console import SafeConsole
from paceline.front.cli.terminal.printing import say
from paceline.front.cli.terminal.tables import Column, FittingTable
from paceline.front.client.client import Client


def submit(arguments: Namespace) -> int:
    """`paceline submit JOB.yaml`."""
    spec = read_job(arguments.job_file, arguments.overrides, arguments.data)
    with client_of(arguments) as client:
        job = client.submit(spec)
        say(job.status.job_id)
        if not arguments.watch:
            return Exit.OK
        return verdict(follow(client, job.status.job_id, quiet=False))


def list_jobs(arguments: Namespace) -> int:
    """`paceline list`."""
    live = [state.value for state in JobState if not state.terminal]
    with reader_of(arguments) as client:
        jobs = all_jobs(client, [] if arguments.all else live)
    console = SafeConsole()
    console.print(job_table(jobs))
    for status in (job.status for job in jobs):
        if status.reason:
            verb = "waits" if status.state in EXPLAINED else status.state
            line = f"{status.job_id} {verb}: {status.reason}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    return Exit.OK


def job_table(jobs: Iterable[ListedJob]) -> FittingTable:
    """One row per job."""
    table = FittingTable(
        *("id", Column("name", 2), "state", "step", "eval reward", Column("age", 1))
    )
    for status in (job.status for job in jobs):
        reward = "" if status.eval_reward is None else f"{status.eval_reward:.3f}"
        table.add_row(
            *(status.job_id, status.name, status.state, str(status.step), reward),
            f"{status.age_s:.0f} s",
        )
    return table


def watch(arguments: Namespace) -> int:
    """`paceline watch ID`."""
    with reader_of(arguments) as client:
        return verdict(follow(client, arguments.job, quiet=arguments.quiet))


def cancel(arguments: Namespace) -> int:
    """`paceline cancel ID`."""
    with client_of(arguments) as client:
        job = client.cancel(arguments.job, reason=arguments.reason)
    say(f"{job.status.job_id}: {job.status.state}")
    return Exit.OK


def verify(arguments: Namespace) -> int:
    """`paceline verify ID`."""
    with reader_of(arguments) as client:
        report = client.verify(arguments.job)
    counts = [*report.counts.items(), *((f"dropped: {k}", n) for k, n in report.dropped.items())]
    for name, number in counts:
        say(f"{name:<28} {number}")
    for problem in report.problems:
        say(f"problem: {problem}", error=True)
    say("ok" if report.ok else "not ok")
    return Exit.OK if report.ok else Exit.INCONSISTENT


def logs(arguments: Namespace) -> int:
    """`paceline logs [NAME]`."""
    folder = run_dir_of(arguments) / "logs"
    if not arguments.name:
        for path in sorted(folder.glob("*.log")):
            say(path.stem)
        return Exit.OK
    paths = [folder / f"{arguments.name}{end}" for end in (".log", ".out")]
    paths = [path for path in paths if path.exists()]
    if not paths:
        raise NotFoundError(f"no logs of {arguments.name!r} in {folder}")
    with ExitStack() as opened:
        handles = [opened.enter_context(path.open(errors="replace")) for path in paths]
        for handle in handles:
            _show_end(handle, lines=arguments.lines)
        if arguments.follow:
            _follow_file(paths[0], handles[0])
    return Exit.OK


def all_jobs(client: Client, states: list[str]) -> list[ListedJob]:
    """All jobs in these states, from all pages; newest first."""
    jobs: list[ListedJob] = []
    token = ""
    while True:
        page = client.list(state=states, page_token=token, page_size=1000)
        jobs += page.jobs
        token = page.next_page_token
        if not token:
            return jobs


def verdict(job: JobView) -> int:
    """The exit code for a job that has ended."""
    status = job.status
    if status.state is not JobState.SUCCEEDED:
        say(f"{status.job_id} {status.state}: {status.reason}", error=True)
        return Exit.JOB
    last = cast(Mapping[str, Any], status.summary.get("eval_last") or {})
    if partial := partial_eval(last):
        say(f"{status.job_id}: the last eval: {partial}", error=True)
    return Exit.INCONSISTENT if status.summary.get("ledger_consistent") is False else Exit.OK


def _show_end(handle: IO[str], *, lines: int) -> None:
    """Print the last lines and leave the file positioned after them."""
    size = os.fstat(handle.fileno()).st_size
    handle.seek(max(0, size - 256 * lines - 1024))
    say("\n".join(handle.read().splitlines()[-lines:]))


def _follow_file(path: Path, handle: IO[str]) -> None:
    while True:
        if text := handle.read():
            say(text, end="")
        elif path.exists() and path.stat().st_ino != os.fstat(handle.fileno()).st_ino:
            handle.close()  # rotated
            handle = path.open(errors="replace")
        else:
            time.sleep(0.25)
