"""`paceline plot`: curves of jobs as files."""

from __future__ import annotations

from argparse import Namespace

from paceline.cli.entry import Exit
from paceline.cli.target.clients import reader_of
from paceline.cli.terminal.printing import say
from paceline.client.curves import REWARD, figure, metric_names, save
from paceline.errors import ConfigError

_LIST = "list"


def plot(arguments: Namespace) -> int:
    """`paceline plot JOB … -o curves.png`."""
    if arguments.smooth < 1:
        raise ConfigError("--smooth: at least 1")
    with reader_of(arguments) as client:
        rows = {job_id: client.history(job_id).rows for job_id in dict.fromkeys(arguments.jobs)}
    if _LIST in arguments.metric:
        every = {name for found in rows.values() for name in metric_names(found)}
        say("\n".join(sorted(every)))
        return Exit.OK
    made = figure(rows, list(dict.fromkeys(arguments.metric)) or [REWARD], smooth=arguments.smooth)
    save(made, arguments.output)
    say(arguments.output)
    return Exit.OK
