"""Options of the commands that show what jobs do."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

Command = Callable[[Any, str, str, str], argparse.ArgumentParser]
"""Makes a command: the commands it joins, its name, its handler, what it does."""


def add(commands: Any, command: Command, add_gateway: Callable[[Any], None]) -> None:
    """Add `trajectories`, `top` and `plot`."""
    for made in (_trajectories(commands, command), _top(commands, command)):
        add_gateway(made)
    add_gateway(_plot(commands, command))


def add_doctor(commands: Any, command: Command, add_gateway: Callable[[Any], None]) -> None:
    """Add `doctor`."""
    text = "show what this machine or a cluster can do, what is missing, and what mends it"
    made = command(commands, "doctor", "doctor:doctor", text)
    made.add_argument("--cluster", action="store_true", help="check the cluster of kubectl instead")
    made.add_argument("--namespace", default="", help="of the cluster (default: kubectl's own)")
    made.add_argument("--store", default="", metavar="URL", help="check this store too: redis://…")
    made.add_argument(
        "--job", type=Path, metavar="JOB.yaml", help="check that this machine has room for it"
    )
    made.add_argument("--json", action="store_true", help="print one JSON object")
    add_gateway(made)


def _trajectories(commands: Any, command: Command) -> argparse.ArgumentParser:
    text = "show the stored episodes of a job, and what was said in them"
    made = command(commands, "trajectories", "trajectories:trajectories", text)
    made.add_argument("job", metavar="ID")
    made.add_argument("--episode", metavar="GROUP/INDEX", default="", help="show this one in full")
    made.add_argument("--group", default="", metavar="GROUP", help="show the siblings of a group")
    made.add_argument("--show", action="store_true", help="show all in full, not as a table")
    made.add_argument(
        "--color",
        choices=("source", "logprob", "version"),
        default="source",
        help="what colours mean (default: source)",
    )
    made.add_argument("--reward", default="", metavar="RANGE", help="e.g. '<0.5' or '>=0.1,<0.9'")
    made.add_argument("--step", default="", metavar="RANGE", help="e.g. 12 or '>=10'")
    made.add_argument(
        "--age", default="", metavar="RANGE", help="steps from its oldest token to its batch"
    )
    made.add_argument("--task", default="", metavar="ID", help="tasks whose id begins so")
    made.add_argument(
        "--status", default="", choices=("", "ok", "parse_error", "timeout"), help="of its score"
    )
    made.add_argument("--failed", action="store_true", help="cut off, or whose score is not ok")
    made.add_argument(
        "--dropped", action="store_true", help="samples of what was not trained, and why"
    )
    made.add_argument("--eval", action="store_true", help="measured ones, not trained ones")
    made.add_argument(
        "-n", "--limit", type=int, default=20, metavar="N", help="at most so many (default: 20)"
    )
    made.add_argument("-f", "--follow", action="store_true", help="show new ones until it ends")
    made.add_argument("--json", action="store_true", help="print one JSON object per line")
    made.add_argument("--no-pager", action="store_true", help="print long output at once")
    made.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="take the tokenizer from here, not from the job",
    )
    return made


def _top(commands: Any, command: Command) -> argparse.ArgumentParser:
    text = "show jobs, services, and who waits for whom"
    made = command(commands, "top", "top:top", text)
    made.add_argument("--tenant", default="", help="only jobs of this tenant")
    made.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="seconds (default: 2)"
    )
    made.add_argument("--once", action="store_true", help="print one interval, and end")
    made.add_argument("--json", action="store_true", help="print one JSON object per interval")
    return made


def _plot(commands: Any, command: Command) -> argparse.ArgumentParser:
    made = command(commands, "plot", "plot:plot", "draw metrics of jobs, as PNG, SVG or PDF")
    made.add_argument("jobs", metavar="ID", nargs="*", help="jobs; several are compared")
    made.add_argument(
        "--group",
        dest="groups",
        action="append",
        default=[],
        metavar="NAME",
        help="all jobs of this name, as mean and standard deviation; with `*`, each name that fits "
        "is a group; repeatable",
    )
    made.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="NAME",
        help="a metric of its rows, `reward`, or `list` to see all; repeatable (default: reward)",
    )
    made.add_argument(
        "-o", "--output", type=Path, default=Path("curves.png"), metavar="FILE", help="curves.png"
    )
    made.add_argument(
        "--smooth", type=int, default=1, metavar="N", help="mean of N steps (default: 1)"
    )
    return made
