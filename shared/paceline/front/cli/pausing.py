"""Jobs of commands that run everything: paused when these are interrupted, and resumed later."""

from __future__ import annotations

import time

from paceline.enums import JobState
from paceline.errors import DeadlineError, PacelineError
from paceline.front.api.documents import JobView
from paceline.front.cli.progress import follow
from paceline.front.cli.terminal.printing import say
from paceline.front.client.client import Client

PAUSE_TIMEOUT_S = 900.0
_POLL_S = 0.5


def follow_or_pause(client: Client, job_id: str, *, quiet: bool) -> JobView:
    """Show a job's progress until it ends. An interrupt pauses it, a second one does not wait.

    Raises:
        KeyboardInterrupt: it was interrupted; says where the job is and how it goes on.
    """
    try:
        return follow(client, job_id, quiet=quiet)
    except KeyboardInterrupt:
        pass
    try:
        job = _pause(client, job_id)
    except KeyboardInterrupt:
        where = f"job {job_id} was not paused and goes on from its newest checkpoint"
    except PacelineError as error:
        where = f"job {job_id} was not paused ({error.message}) and goes on from where it is stored"
    else:
        if job.status.state.terminal:
            return job
        where = f"job {job_id} is paused at step {job.status.step}"
    raise KeyboardInterrupt(f"interrupted; {where}: the same command resumes it")


def resume(client: Client, job: JobView) -> None:
    """Let a job go on that an earlier command has left, whatever its state.

    Raises:
        DeadlineError: it is still pausing.
    """
    job_id = job.status.job_id
    job = _until_paused(client, job)
    if job.status.state is JobState.PAUSED:
        client.resume(job_id)


def _pause(client: Client, job_id: str) -> JobView:
    say(
        f"pausing {job_id}: its trainer finishes the step and writes a checkpoint; "
        "interrupt again (Ctrl-C) to stop without waiting",
        error=True,
    )
    return _until_paused(client, client.pause(job_id, reason="interrupted"))


def _until_paused(client: Client, job: JobView) -> JobView:
    deadline = time.monotonic() + PAUSE_TIMEOUT_S
    while job.status.state is JobState.PAUSING:
        if time.monotonic() >= deadline:
            raise DeadlineError(f"it was still pausing after {PAUSE_TIMEOUT_S:.0f} s")
        time.sleep(_POLL_S)
        job = client.get(job.status.job_id)
    return job
