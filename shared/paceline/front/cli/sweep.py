"""`paceline sweep`: a job with several settings and seeds, and how they compare."""

from __future__ import annotations

import hashlib
import json
import re
from argparse import Namespace
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any, cast

from paceline.config import JobSpec
from paceline.config.documents import read_yaml
from paceline.enums import JobState
from paceline.errors import ConfigError, InvalidError
from paceline.front.api.documents import JobView, MetricRow
from paceline.front.cli.check import allowed_targets, check, check_endpoints, read_job
from paceline.front.cli.entry import Exit
from paceline.front.cli.local import running
from paceline.front.cli.pausing import follow_or_pause, resume
from paceline.front.cli.progress import follow
from paceline.front.cli.target.clients import client_of, named_url
from paceline.front.cli.target.run_dirs import DEFAULT_RUN_DIR, live_url, named_run_dir, remember
from paceline.front.cli.terminal.console import SafeConsole
from paceline.front.cli.terminal.printing import say
from paceline.front.cli.terminal.tables import Column, FittingTable
from paceline.front.client.client import Client
from paceline.front.client.curves import REWARD, metric_curves

_LAST_STEPS = 10
_MOST_JOBS = 256
_MOST_NAME = 53
_DIGEST = 6
Follow = Callable[[Client, str], JobView]


@dataclass(frozen=True, slots=True)
class SweptValue:
    """A value of a field, and how it was written."""

    field: str
    value: Any
    text: str


@dataclass(frozen=True, slots=True)
class SweptSetting:
    """One choice of values, and the name of its jobs, which differ by their seed alone."""

    job: str  # the name in the job file
    label: str
    name: str
    specs: tuple[JobSpec, ...]


@dataclass(frozen=True, slots=True)
class SweptJob:
    """The result of a job; a reward is None if nothing was measured."""

    job_id: str
    state: JobState
    held_out: float | None
    training: float | None


def sweep(arguments: Namespace) -> int:
    """`paceline sweep JOB.yaml --seeds 3 --set a=1,2`."""
    settings = list(planned(arguments))
    with _installation(arguments, settings) as (client, follow_one):
        swept = _run(client, settings, follow_one)
    if arguments.json:
        for setting, jobs in zip(settings, swept, strict=True):
            say(json.dumps(_as_json(setting, jobs)))
    else:
        SafeConsole().print(comparison(settings, swept))
        names = " ".join(f"--group {one.name}" for one in settings)
        say(f"draw them: paceline plot {names}", error=True)
    ended = [job.state for jobs in swept for job in jobs]
    return Exit.OK if all(state is JobState.SUCCEEDED for state in ended) else Exit.JOB


def planned(arguments: Namespace) -> Iterator[SweptSetting]:
    """The settings of a command, with their jobs, all of which are checked.

    Raises:
        ConfigError: a job is wrong, or there are too many.
    """
    if arguments.seeds < 1:
        raise ConfigError(f"--seeds: {arguments.seeds} is not allowed; at least 1")
    grid = [_values(text) for text in arguments.overrides]
    choices = list(product(*grid))
    if (count := len(choices) * arguments.seeds) > _MOST_JOBS:
        raise ConfigError(f"{count} jobs; a sweep has at most {_MOST_JOBS}")
    varied = [number for number, values in enumerate(grid) if len(values) > 1]
    names: set[str] = set()
    for choice in choices:
        fixed = [f"{value.field}={json.dumps(value.value)}" for value in choice]
        spec = read_job(arguments.job_file, fixed, arguments.data)
        shown = [choice[number] for number in varied]
        label = ", ".join(f"{value.field}={value.text}" for value in shown)
        short = "-".join(f"{value.field.rpartition('.')[2]}-{value.text}" for value in shown)
        name = _name(spec.name, short, label, names)
        names.add(name)
        seeds = [spec.tasks.seed + number for number in range(arguments.seeds)]
        specs = tuple(_with(spec, name, seed) for seed in seeds)
        check(specs[0], allowed_targets(arguments))
        check_endpoints(specs[0], arguments.endpoints)
        yield SweptSetting(spec.name, label or spec.name, name, specs)


def comparison(
    settings: Sequence[SweptSetting], swept: Sequence[Sequence[SweptJob]]
) -> FittingTable:
    """One row for each setting: mean and standard deviation over its seeds."""
    table = FittingTable(
        *("setting", "succeeded", "held-out reward"),
        *(Column(f"training reward (last {_LAST_STEPS} steps)", 1), Column("name", 2)),
    )
    for setting, jobs in zip(settings, swept, strict=True):
        good = sum(job.state is JobState.SUCCEEDED for job in jobs)
        held_out, training = ([job.held_out for job in jobs], [job.training for job in jobs])
        cells = (f"{good} of {len(jobs)}", spread(held_out), spread(training), setting.name)
        table.add_row(setting.label, *cells)
    return table


def spread(values: Sequence[float | None]) -> str:
    """Mean and sample standard deviation of what was measured: `0.934 ± 0.012`."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return f"{mean(known):.3f}" + (f" ± {stdev(known):.3f}" if len(known) > 1 else "")


@contextmanager
def _installation(
    arguments: Namespace, settings: Sequence[SweptSetting]
) -> Generator[tuple[Client, Follow]]:
    """The server that is named or serves in the run directory; else one for this command.

    Jobs of a server go on when the command is interrupted; those of this command are paused.
    """
    named = named_run_dir(arguments)
    if named_url(arguments) or live_url(named or DEFAULT_RUN_DIR):
        with client_of(arguments) as client:
            for setting in settings:  # all at once: the server decides how many run together
                for spec in setting.specs:
                    _submit(client, spec)
            yield client, partial(follow, quiet=arguments.quiet)
        return
    run_dir = named or Path("runs") / f"{settings[0].job}-sweep"
    with running(run_dir, arguments) as local, Client(local.url, token=local.token) as client:
        remember(run_dir)
        yield client, partial(_follow_own, quiet=arguments.quiet)


def _follow_own(client: Client, job_id: str, *, quiet: bool) -> JobView:
    """Follow a job of this command; one that an earlier command has left goes on first."""
    resume(client, client.get(job_id))
    return follow_or_pause(client, job_id, quiet=quiet)


def _run(
    client: Client, settings: Sequence[SweptSetting], follow_one: Follow
) -> list[list[SweptJob]]:
    """Each job followed to its end, in order."""
    number, count = 0, sum(len(one.specs) for one in settings)
    swept: list[list[SweptJob]] = []
    for setting in settings:
        jobs: list[SweptJob] = []
        for spec in setting.specs:
            number += 1
            job_id = _submit(client, spec).status.job_id
            say(f"{number}/{count}  {job_id}  {setting.label}, seed {spec.tasks.seed}", error=True)
            job = follow_one(client, job_id)
            jobs.append(_result(job, client.history(job_id).rows))
            if (status := job.status).state is not JobState.SUCCEEDED:
                say(f"{job_id} {status.state}: {status.reason}", error=True)
        swept.append(jobs)
    return swept


def _submit(client: Client, spec: JobSpec) -> JobView:
    """The job of a spec; that of an earlier sweep with the same spec, so that it goes on."""
    prepared = client.send_files(spec)
    whole = prepared if isinstance(prepared, dict) else spec.model_dump(mode="json")
    digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
    return client.submit(prepared, request_id=f"sweep-{digest[:32]}")


def _result(job: JobView, rows: Sequence[MetricRow]) -> SweptJob:
    curves = [curve for curve in metric_curves(rows, REWARD) if not curve.held_out]
    last = curves[0].values[-_LAST_STEPS:] if curves else ()
    status = job.status
    training = mean(last) if last else None
    return SweptJob(status.job_id, status.state, status.eval_reward, training)


def _values(text: str) -> list[SweptValue]:
    """The field of `FIELD=VALUE,...` with each of its values."""
    field, equals, values = text.partition("=")
    if not equals or not field or not values:
        raise InvalidError(f"--set {text}: write FIELD=VALUE, or FIELD=VALUE,VALUE to compare")
    texts = [item.strip() for item in values.split(",")]
    try:
        parsed = cast("list[Any]", read_yaml(f"[{values}]", what=f"--set {field}"))
    except InvalidError:
        parsed = cast("list[Any]", texts)
    if len(parsed) != len(texts):  # lists have commas of their own
        texts = [json.dumps(value) for value in parsed]
    return [SweptValue(field, *pair) for pair in zip(parsed, texts, strict=True)]


def _with(spec: JobSpec, name: str, seed: int) -> JobSpec:
    tasks = spec.tasks.model_copy(update={"seed": seed})
    return spec.model_copy(update={"name": name, "tasks": tasks})


def _name(job: str, setting: str, label: str, taken: set[str]) -> str:
    """A name for the jobs of a setting that no other of the sweep has."""
    plain = re.sub(r"[^a-z0-9]+", "-", f"{job}-{setting}".lower()).strip("-")
    if len(plain) <= _MOST_NAME and plain not in taken:
        return plain
    digest = hashlib.sha256(label.encode()).hexdigest()[:_DIGEST]
    return f"{plain[: _MOST_NAME - _DIGEST - 1].strip('-')}-{digest}"


def _as_json(setting: SweptSetting, jobs: Sequence[SweptJob]) -> dict[str, Any]:
    return {
        "setting": setting.label,
        "name": setting.name,
        "jobs": [job.job_id for job in jobs],
        "states": [job.state.value for job in jobs],
        "held_out": [job.held_out for job in jobs],
        "training": [job.training for job in jobs],
    }
