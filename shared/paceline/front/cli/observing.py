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
    for parser in (_trajectories(commands, command), _top(commands, command)):
        add_gateway(parser)
    add_gateway(_plot(commands, command))


def add_doctor(commands: Any, command: Command, add_gateway: Callable[[Any], None]) -> None:
    """Add `doctor`."""
    text = "show what this machine or a cluster can do, what is missing, and what mends it"
    parser = command(commands, "doctor", "doctor:doctor", text)
    parser.add_argument(
        "--cluster", action="store_true", help="check the cluster of kubectl instead"
    )
    parser.add_argument("--namespace", default="", help="of the cluster (default: kubectl's own)")
    parser.add_argument(
        "--store", default="", metavar="URL", help="check this store too: redis://…"
    )
    parser.add_argument(
        "--job", type=Path, metavar="JOB.yaml", help="check that this machine has room for it"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_gateway(parser)


def _trajectories(commands: Any, command: Command) -> argparse.ArgumentParser:
    text = "show the stored episodes of a job, and what was said in them"
    parser = command(commands, "trajectories", "trajectories:trajectories", text)
    parser.add_argument("job", metavar="ID")
    parser.add_argument(
        "--episode", metavar="GROUP/INDEX", default="", help="show this one in full"
    )
    parser.add_argument("--group", default="", metavar="GROUP", help="show the siblings of a group")
    parser.add_argument("--show", action="store_true", help="show all in full, not as a table")
    parser.add_argument(
        "--color",
        choices=("source", "logprob", "version"),
        default="source",
        help="what colours mean (default: source)",
    )
    parser.add_argument("--reward", default="", metavar="RANGE", help="e.g. '<0.5' or '>=0.1,<0.9'")
    parser.add_argument("--step", default="", metavar="RANGE", help="e.g. 12 or '>=10'")
    parser.add_argument(
        "--age", default="", metavar="RANGE", help="steps from its oldest token to its batch"
    )
    parser.add_argument("--task", default="", metavar="ID", help="tasks whose id begins so")
    parser.add_argument(
        "--status", default="", choices=("", "ok", "parse_error", "timeout"), help="of its score"
    )
    parser.add_argument("--failed", action="store_true", help="cut off, or whose score is not ok")
    parser.add_argument(
        "--dropped", action="store_true", help="samples of what was not trained, and why"
    )
    parser.add_argument("--eval", action="store_true", help="measured ones, not trained ones")
    parser.add_argument(
        "-n", "--limit", type=int, default=20, metavar="N", help="at most so many (default: 20)"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="show new ones until it ends")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    parser.add_argument("--no-pager", action="store_true", help="print long output at once")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="take the tokenizer from here, not from the job",
    )
    return parser


def _top(commands: Any, command: Command) -> argparse.ArgumentParser:
    text = "show jobs, services, and who waits for whom"
    parser = command(commands, "top", "top:top", text)
    parser.add_argument("--tenant", default="", help="only jobs of this tenant")
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="seconds (default: 2)"
    )
    parser.add_argument("--once", action="store_true", help="print one interval, and end")
    parser.add_argument("--json", action="store_true", help="print one JSON object per interval")
    return parser


def _plot(commands: Any, command: Command) -> argparse.ArgumentParser:
    parser = command(commands, "plot", "plot:plot", "draw metrics of jobs, as PNG, SVG or PDF")
    parser.add_argument("jobs", metavar="ID", nargs="*", help="jobs; several are compared")
    parser.add_argument(
        "--group",
        dest="groups",
        action="append",
        default=[],
        metavar="NAME",
        help="all jobs of this name, as mean and standard deviation; with `*`, each name that fits "
        "is a group; repeatable",
    )
    parser.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="NAME",
        help="a metric of its rows, `reward`, or `list` to see all; repeatable (default: reward)",
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("curves.png"), metavar="FILE", help="curves.png"
    )
    parser.add_argument(
        "--smooth", type=int, default=1, metavar="N", help="mean of N steps (default: 1)"
    )
    return parser
