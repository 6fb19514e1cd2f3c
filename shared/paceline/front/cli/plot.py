"""`paceline plot`: curves of jobs, and of jobs of one name together, as files."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from fnmatch import fnmatchcase

from paceline.errors import ConfigError, NotFoundError
from paceline.front.api.documents import MetricRow
from paceline.front.cli.entry import Exit
from paceline.front.cli.remote import all_jobs
from paceline.front.cli.target.clients import reader_of
from paceline.front.cli.terminal.printing import say
from paceline.front.client.client import Client
from paceline.front.client.curves import REWARD, figure, metric_names, save

_LIST = "list"


def plot(arguments: Namespace) -> int:
    """`paceline plot JOB … --group NAME -o curves.png`."""
    if arguments.smooth < 1:
        raise ConfigError("--smooth: at least 1")
    if not arguments.jobs and not arguments.groups:
        raise ConfigError("name jobs by their ids, or with --group by their name")
    with reader_of(arguments) as client:
        rows = {job_id: client.history(job_id).rows for job_id in dict.fromkeys(arguments.jobs)}
        groups = _groups(client, arguments.groups) if arguments.groups else {}
    if _LIST in arguments.metric:
        every = [*rows.values(), *(runs for group in groups.values() for runs in group)]
        say("\n".join(sorted({name for history in every for name in metric_names(history)})))
        return Exit.OK
    metrics = list(dict.fromkeys(arguments.metric)) or [REWARD]
    save(figure(rows, metrics, groups=groups, smooth=arguments.smooth), arguments.output)
    say(arguments.output)
    return Exit.OK


def _groups(client: Client, patterns: Sequence[str]) -> dict[str, list[Sequence[MetricRow]]]:
    """The histories of jobs by name, oldest first.

    Raises:
        NotFoundError: no job has such a name.
    """
    listed = [job.status for job in reversed(all_jobs(client, []))]
    by_group: dict[str, list[Sequence[MetricRow]]] = {}
    for pattern in dict.fromkeys(patterns):
        names = {job.name for job in listed if fnmatchcase(job.name, pattern)}
        if not names:
            known = ", ".join(sorted({job.name for job in listed})) or "none"
            raise NotFoundError(f"--group {pattern}: no job has this name; there are: {known}")
        for name in sorted(names - by_group.keys()):
            members = [job.job_id for job in listed if job.name == name]
            histories = [client.history(job_id).rows for job_id in members]
            by_group[name] = [rows for rows in histories if rows]  # others have not begun
    return by_group
