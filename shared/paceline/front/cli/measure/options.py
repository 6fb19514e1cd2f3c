"""Options of `paceline eval` and `paceline generate`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.front.cli.observing import Command

Add = Callable[[argparse.ArgumentParser], None]


def add(commands: Any, command: Command, shared: Add) -> None:
    """Add both; `shared` adds the options of commands that start everything or call a gateway."""
    text = "measure a model, or a checkpoint of a job; trains nothing"
    evaluate = command(commands, "eval", "measure.run:evaluate", text)
    text = "sample answers of a model, or of a checkpoint, into a file; trains nothing"
    generate = command(commands, "generate", "measure.run:generate", text)
    for parser in (evaluate, generate):
        _add_what(parser)
        shared(parser)
    evaluate.add_argument(
        "--pass-at", type=_counts, metavar="K,…", help="report pass@k (default: 1 and --samples)"
    )
    evaluate.add_argument(
        "--majority-at", type=_counts, metavar="K,…", help="report maj@k (default: --samples)"
    )
    evaluate.add_argument("--json", action="store_true", help="print one JSON object")
    generate.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="a new .jsonl or .parquet"
    )


def _add_what(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="MODEL|JOB[@STEP]",
        help="a folder, a model of the hub, or the checkpoint of a job: JOB, JOB@120, JOB@best; "
        "with --endpoint the name of the model there",
    )
    parser.add_argument(
        "--endpoint",
        default="",
        metavar="URL|NAME",
        help="OpenAI-compatible server that answers, e.g. http://127.0.0.1:8000/v1, or one of "
        "the installation's `endpoints`",
    )
    parser.add_argument(
        "--key-env", default="", metavar="VARIABLE", help="where the API key of that URL is"
    )
    parser.add_argument(
        "-f", "--file", type=Path, metavar="YAML", help="job file with environment and reward"
    )
    parser.add_argument("--env", default="", metavar="NAME", help="environment, instead of a file")
    parser.add_argument(
        "--option",
        dest="options",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option of the environment, e.g. split=heldout; repeatable",
    )
    parser.add_argument(
        "--reward",
        action="append",
        default=[],
        metavar="KIND",
        help="part of the reward (default: that of the job, else the environment's); repeatable",
    )
    parser.add_argument("--tasks", type=int, metavar="N", help="tasks (default: 100)")
    parser.add_argument("--samples", type=int, metavar="K", help="episodes of a task (default: 1)")
    parser.add_argument("--temperature", type=float, metavar="T")
    parser.add_argument("--seed", type=int, metavar="N", help="order of tasks, and sampling")
    parser.add_argument(
        "--pass-reward", type=float, metavar="R", help="a sample is right from it on (default: 1)"
    )
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="leave out tasks that take longer in all"
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="override a field of the job file, e.g. sampling.max_tokens=512; repeatable",
    )
    parser.add_argument(
        "--data", type=Path, metavar="PATH", help="rows to send with the job (docs/data.md)"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def _counts(text: str) -> list[int]:
    try:
        return [int(count) for count in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; write numbers such as 1,8") from None
