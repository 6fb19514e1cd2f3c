"""Options of the commands that change jobs, or take something out of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.front.cli.observing import Command

AddGateway = Callable[[Any], None]


def add_replay(commands: Any, command: Command, add_gateway: AddGateway) -> None:
    """Add `replay import`."""
    replay = commands.add_parser("replay", help="give trajectories to the replay of a job")
    verbs = replay.add_subparsers(title="commands", metavar="COMMAND", required=True)
    bring = command(verbs, "import", "replay:add", "store trajectories that were collected before")
    bring.add_argument("job", metavar="ID")
    bring.add_argument("file", metavar="FILE", type=Path, help="JSON lines, as jobs export them")
    add_gateway(bring)


def add_lifecycle(
    commands: Any, command: Command, add_gateway: AddGateway
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Add `pause`, `resume`, `delete` and `fork`; returns the first two."""
    pause = command(
        commands, "pause", "lifecycle:pause", "free the workers of a job; it keeps its place"
    )
    resume = command(commands, "resume", "lifecycle:resume", "queue a paused job again")
    delete = command(
        commands, "delete", "lifecycle:delete", "delete jobs with their checkpoints and files"
    )
    delete.add_argument("jobs", metavar="ID", nargs="+")
    delete.add_argument("--force", action="store_true", help="cancel a job first if it is not over")
    for parser in (pause, resume):
        parser.add_argument("--reason", default="", help="recorded with the job")
    for parser, what in ((pause, "the job is paused"), (delete, "nothing is left")):
        parser.add_argument("--no-wait", action="store_true", help=f"do not wait until {what}")
        parser.add_argument(
            "--timeout", type=float, default=600.0, metavar="S", help="seconds (default: 600)"
        )
    fork = command(
        commands, "fork", "lifecycle:fork", "submit a job that continues from a job's checkpoint"
    )
    fork.add_argument("job", metavar="ID")
    which = fork.add_mutually_exclusive_group()
    which.add_argument("--step", dest="which", type=int, metavar="N", help="that of this step")
    for name, text in (("best", "the best one by eval"), ("latest", "the newest one (default)")):
        which.add_argument(f"--{name}", dest="which", action="store_const", const=name, help=text)
    fork.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change a field of the job file, e.g. --set stop.steps=400",
    )
    fork.add_argument("-f", "--file", type=Path, metavar="YAML", help="fields to change")
    fork.add_argument("--watch", action="store_true", help="follow the job until it ends")
    add_gateway(delete)
    add_gateway(fork)
    return pause, resume


def add_export(commands: Any, command: Command, add_gateway: AddGateway) -> None:
    """Add `checkpoints` and `export`."""
    listing = command(commands, "checkpoints", "export:checkpoints", "list checkpoints of a job")
    export = command(
        commands, "export", "export:export", "write a checkpoint as a Hugging Face folder"
    )
    which = export.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", dest="which", type=int, metavar="N", help="that of this step")
    for name, text in (("best", "the best one by eval"), ("latest", "the newest one")):
        which.add_argument(f"--{name}", dest="which", action="store_const", const=name, help=text)
    export.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new folder")
    export.add_argument(
        "--adapter", action="store_true", help="of a LoRA job: the adapter alone, for peft"
    )
    export.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="precision of the weights (default: the one that the job's engines have)",
    )
    export.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="of a file (default: 5GB)"
    )
    export.add_argument(
        "--storage",
        default="",
        metavar="URL",
        help="where checkpoints lie, such as s3://bucket/prefix (default: the run directory)",
    )
    export.add_argument(
        "--base-model",
        type=Path,
        metavar="DIR",
        help="the model that the job began with (default: the job's model.path)",
    )
    add_models(export)
    for parser in (listing, export):
        parser.add_argument("job", metavar="ID")
        add_gateway(parser)


def add_models(command: argparse.ArgumentParser) -> None:
    """Add `--models`."""
    command.add_argument(
        "--models",
        type=Path,
        metavar="FILE",
        help="YAML: `models`, where models of jobs may come from (see docs/models.md)",
    )
