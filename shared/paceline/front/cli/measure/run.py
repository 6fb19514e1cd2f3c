"""Runs jobs of kind `eval` for `paceline eval` and `paceline generate`."""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.config import JobSpec
from paceline.config.precision import with_dtype
from paceline.enums import JobState, Purpose
from paceline.errors import InvalidError, StateError
from paceline.front.api.documents import JobView
from paceline.front.cli.check import allowed_targets, check, check_endpoints
from paceline.front.cli.local import running
from paceline.front.cli.measure.job import EvalTarget, of_job, of_model, target_of
from paceline.front.cli.measure.outside import check_here, servers_of
from paceline.front.cli.measure.results import document, table_of
from paceline.front.cli.measure.rows import RowFile, check_path, rows_of
from paceline.front.cli.progress import follow
from paceline.front.cli.remote import verdict
from paceline.front.cli.target.clients import client_of, named_url
from paceline.front.cli.target.run_dirs import live_url, named_run_dir, run_dir_of
from paceline.front.cli.terminal.console import SafeConsole
from paceline.front.cli.terminal.printing import say
from paceline.front.cli.trajectories import tokenizer_files
from paceline.front.client.client import Client
from paceline.tokens.chat import Tokenizer
from paceline.types import Trajectory

_PAGE = 100
Row = dict[str, Any]


def evaluate(arguments: Namespace) -> int:
    """`paceline eval MODEL|JOB[@STEP]`."""
    arguments.collects = False
    with _client(arguments) as client:
        job = _measured(client, arguments)
        rows = _rows(client, job.status.job_id)
    if arguments.json:
        say(json.dumps(document(job, rows)))
    else:
        SafeConsole().print(table_of(rows))
    return verdict(job)


def generate(arguments: Namespace) -> int:
    """`paceline generate MODEL|JOB[@STEP] --out FILE`."""
    check_path(arguments.out)
    arguments.collects = True
    with _client(arguments) as client:
        job = _measured(client, arguments)
        if job.status.state is not JobState.SUCCEEDED:
            return verdict(job)
        dropped = sum(row["dropped"] for row in _rows(client, job.status.job_id))
        written = _write(client, job, arguments.out)
    if dropped:
        say(f"{dropped} tasks could not be measured and are left out", error=True)
    say(f"{arguments.out}: {written} rows of job {job.status.job_id}")
    return verdict(job)


def _measured(client: Client, arguments: Namespace) -> JobView:
    """Submit the job and follow it to its end."""
    target = _target(arguments)
    spec = _spec(client, arguments, target)
    job_id = client.submit(spec).status.job_id
    try:
        return follow(client, job_id, quiet=arguments.quiet, console=SafeConsole(stderr=True))
    except KeyboardInterrupt:
        with suppress(StateError):
            client.cancel(job_id, reason="interrupted")
        raise


def _spec(client: Client, arguments: Namespace, target: EvalTarget) -> JobSpec:
    if target.job:
        return of_job(arguments, target, client.get(target.job).spec)
    spec = with_dtype(of_model(arguments, target.model), "auto")
    check(spec, allowed_targets(arguments))
    if not _running_url(arguments):
        check_endpoints(spec, arguments.endpoints, also=servers_of(arguments))
    return spec


def _target(arguments: Namespace) -> EvalTarget:
    """At an endpoint every name is one of a model."""
    if arguments.endpoint:
        return EvalTarget(model=arguments.target)
    return target_of(arguments.target)


def _running_url(arguments: Namespace) -> str | None:
    """The gateway that is named, or runs already in a run directory."""
    if named := named_url(arguments):
        return named
    run_dir = _run_dir(arguments)
    return None if run_dir is None else live_url(run_dir)


def _run_dir(arguments: Namespace) -> Path | None:
    is_job = bool(_target(arguments).job)
    return run_dir_of(arguments) if is_job else named_run_dir(arguments)


@contextmanager
def _client(arguments: Namespace) -> Generator[Client]:
    """A client of the gateway that is named or runs already, else of one that is started here."""
    if _running_url(arguments):
        if arguments.endpoint:
            check_here(arguments)
        with client_of(arguments) as client:
            yield client
        return
    servers = servers_of(arguments)
    with tempfile.TemporaryDirectory(prefix="paceline-eval-") as name:
        place = _run_dir(arguments) or Path(name)
        with (
            running(place, arguments, endpoints=servers) as local,
            Client(local.url, token=local.token) as client,
        ):
            yield client


def _rows(client: Client, job_id: str) -> list[Row]:
    """The results of each set, in the order of the history."""
    page = client.list_metrics(job_id, page_size=5000)
    return [row.values for row in page.rows if row.kind == Purpose.EVAL]


def _write(client: Client, job: JobView, path: Path) -> int:
    """Write all episodes; returns how many rows there are.

    Raises:
        StateError: an episode is missing.
    """
    job_id = job.status.job_id
    wanted = sum(_num_episodes(job, row) for row in _rows(client, job_id))
    with closing(RowFile()) as file:
        decode = _decoder(client, job)
        for episode in _episodes(client, job_id):
            for place, row in rows_of(episode, job_id=job_id, decode=decode):
                file.add(place, row)
        if file.num_episodes != wanted:
            raise StateError(f"{path}: {file.num_episodes} episodes of {wanted} are stored")
        return file.write(path)


def _num_episodes(job: JobView, row: Row) -> int:
    name = row.get("set", "")
    settings = job.spec["evals"][name] if name else job.spec["eval"]
    return int(row["measured"]) * int(settings.get("samples", 1))


def _episodes(client: Client, job_id: str) -> Iterator[Trajectory]:
    token = ""
    while True:
        page = client.list_trajectories(
            job_id, page_size=_PAGE, page_token=token, purpose=Purpose.EVAL
        )
        yield from page.trajectories
        token = page.next_page_token
        if not token:
            return


def _decoder(client: Client, job: JobView) -> Callable[[Sequence[int]], str]:
    """Decodes with the tokenizer that the job was accepted with, special tokens too.

    Raises:
        InvalidError: it has none.
    """
    if job.spec["model"].get("endpoint"):
        return lambda _: ""  # there are no tokens
    files = tokenizer_files(client, job)
    if not files:
        raise InvalidError(f"job {job.status.job_id} has no tokenizer to decode its tokens with")
    pieces = Tokenizer.from_files(files).pieces
    return lambda tokens: "".join(pieces(tokens))
