"""Parses the command line, calls the handler and turns errors into exit codes."""

from __future__ import annotations

import argparse
import importlib
import signal
from enum import IntEnum
from pathlib import Path
from typing import Any

from paceline.front.cli import job_commands, observing
from paceline.front.cli.administration import options as administration
from paceline.front.cli.measure import options as measuring
from paceline.front.cli.terminal.printing import say
from paceline.platform.program import importing

EPILOG = """\
exit codes:
  0    ok
  1    the job failed or was cancelled
  2    bad input
  3    a service or store cannot be reached, or a port is in use
  4    the ledger is inconsistent
  130  interrupted
"""


# Commands that run everything need every part, whichever is missed first.
_EXTRAS = dict.fromkeys(("local", "sweep", "trial"), "local")


class Exit(IntEnum):
    """Exit codes of the command."""

    OK = 0
    JOB = 1
    INPUT = 2
    REACH = 3
    INCONSISTENT = 4
    INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run the `paceline` command; returns its exit code."""
    arguments = parser().parse_args(argv)
    # SIGTERM cleans up like Ctrl-C.
    signal.signal(signal.SIGTERM, _interrupt)
    module, _, name = arguments.handler.partition(":")
    from paceline.errors import DeadlineError, PacelineError, UnavailableError
    from paceline.errors.extras import not_installed

    try:
        if trusted := getattr(arguments, "trust", None):
            arguments.allow += [target for folder in trusted for target in _trusted(folder)]
        with importing():
            handler = getattr(importlib.import_module(f"paceline.front.cli.{module}"), name)
        return int(handler(arguments))
    except KeyboardInterrupt as error:
        return _fail(str(error) or "interrupted", Exit.INTERRUPTED)
    except BrokenPipeError:
        return Exit.OK
    except (UnavailableError, DeadlineError) as error:
        return _fail(error.message, Exit.REACH)
    except PacelineError as error:
        return _fail(error.message, Exit.INPUT)
    except ModuleNotFoundError as error:
        return _fail(not_installed(error, extra=_EXTRAS.get(module, "")), Exit.INPUT)


def _trusted(folder: Path) -> list[str]:
    from paceline.front.local.trusted import trust

    return trust(folder)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands and their options."""
    top = argparse.ArgumentParser(
        prog="paceline",
        description="Asynchronous RL post-training for LLM agents.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=_version())
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_local(commands)
    _add_remote(commands)
    _add_offline(commands)
    return top


def _add_local(commands: Any) -> None:
    run = _command(commands, "run", "local:run", "run a job to completion on this machine")
    _add_job_file(run)
    _add_data(run)
    _add_run_dir(run, "default: PACELINE_RUN_DIR, else runs/ and the job's name")
    _add_base(run, None, "8300 if it is free")
    run.add_argument(
        "--again",
        action="store_true",
        help="run even if a job succeeded here; replaces its results",
    )
    run.add_argument("--quiet", action="store_true", help="print only the outcome")
    trial = _command(
        commands,
        "try",
        "trial:try_job",
        "run a few episodes of a job and show them; trains nothing",
    )
    _add_job_file(trial)
    _add_data(trial)
    trial.add_argument("--episodes", type=int, default=4, metavar="N", help="how many (default: 4)")
    trial.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="seconds (default: 300)"
    )
    _add_run_dir(trial, "default: a temporary folder")
    _add_base(trial, 0, "0")
    measuring.add(commands, _command, _add_anywhere)
    sweep = _command(
        commands, "sweep", "sweep:sweep", "run a job with several settings and seeds, and compare"
    )
    _add_job_file(sweep, "FIELD=VALUE,...", "values of a field to compare, or one for all jobs")
    _add_data(sweep)
    sweep.add_argument("--seeds", type=int, default=1, metavar="N", help="of each (default: 1)")
    sweep.add_argument("--json", action="store_true", help="print one JSON object per setting")
    sweep.add_argument("--quiet", action="store_true", help="print only what each job came to")
    _add_gateway(sweep)
    _add_base(sweep, None, "8300 if it is free")
    for command in (run, trial, sweep):
        command.set_defaults(data_folders=None)  # one user's jobs read all that the user may
    up = _command(commands, "up", "local:up", "serve on this machine until interrupted")
    _add_run_dir(up, "default: PACELINE_RUN_DIR, else runs/local")
    up.add_argument(
        "--data-folder",
        dest="data_folders",
        action="append",
        default=[],
        metavar="FOLDER",
        help="folder, or prefix of URLs (s3://bucket/), below which jobs of all tenants may read "
        "rows; repeatable (default: none, see docs/data.md)",
    )
    _add_base(up, 8300, "8300")


def _add_anywhere(command: argparse.ArgumentParser) -> None:
    """For commands that call the gateway that is named or runs, or else start everything."""
    _add_gateway(command)
    _add_base(command, 0, "0")
    command.set_defaults(data_folders=None)


def _add_remote(commands: Any) -> None:
    submit = _command(commands, "submit", "remote:submit", "submit a job; prints its id")
    _add_job_file(submit)
    _add_data(submit)
    submit.add_argument("--watch", action="store_true", help="follow the job until it ends")
    listing = _command(commands, "list", "remote:list_jobs", "list jobs")
    listing.add_argument("--all", action="store_true", help="include finished jobs")
    watch = _command(commands, "watch", "remote:watch", "follow a job until it ends")
    watch.add_argument("--quiet", action="store_true", help="print only the outcome")
    cancel = _command(commands, "cancel", "remote:cancel", "cancel a job")
    cancel.add_argument("--reason", default="", help="recorded with the job")
    pause, resume = job_commands.add_lifecycle(commands, _command, _add_gateway)
    verify = _command(commands, "verify", "remote:verify", "check the ledger of a job")
    weights = _command(
        commands, "weights", "weights:show", "show which workers hold which weights of a job"
    )
    for command in (watch, cancel, pause, resume, verify, weights):
        command.add_argument("job", metavar="ID")
    for command in (submit, listing, watch, cancel, pause, resume, verify, weights):
        _add_gateway(command)
    job_commands.add_replay(commands, _command, _add_gateway)
    job_commands.add_export(commands, _command, _add_gateway)
    observing.add(commands, _command, _add_gateway)
    administration.add(commands, _command, _add_gateway)
    logs = _command(commands, "logs", "remote:logs", "show the logs of a run directory")
    logs.add_argument(
        "name", nargs="?", default="", help="process to show; lists the processes if omitted"
    )
    logs.add_argument(
        "-n", "--lines", type=int, default=50, help="number of last lines (default: 50)"
    )
    logs.add_argument("-f", "--follow", action="store_true", help="wait for more lines")
    _add_run_dir(
        logs, "default: PACELINE_RUN_DIR, else runs/local while it serves, else the last run's"
    )


def _add_offline(commands: Any) -> None:
    validate = _command(commands, "validate", "check:validate", "check a job file")
    _add_job_file(validate)
    _add_allow(validate)
    validate.add_argument(
        "--resolved", action="store_true", help="print the job with all its values"
    )
    plan = _command(
        commands, "plan", "needs.devices:plan", "show which GPUs of a machine a job would get"
    )
    _add_job_file(plan)
    _add_allow(plan)
    plan.add_argument(
        "--devices",
        default="",
        metavar="8x80GiB",
        help="GPUs of another machine: 8xH100:80GiB, 2x80GiB+1x24GiB, none (default: those here)",
    )
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    data = commands.add_parser("data", help="look at the rows of a job")
    verbs = data.add_subparsers(title="commands", metavar="COMMAND", required=True)
    inspect = _command(
        verbs, "inspect", "data:inspect", "show tasks as they are prompted, and their lengths"
    )
    _add_job_file(inspect)
    _add_data(inspect)
    _add_allow(inspect)
    inspect.add_argument(
        "--rows", type=int, default=3, metavar="N", help="tasks to show (default: 3)"
    )
    inspect.add_argument(
        "--sample",
        type=int,
        default=2000,
        metavar="N",
        help="tasks whose tokens are counted (default: 2000)",
    )
    _command(commands, "plugins", "check:plugins", "list the installed plug-ins")
    observing.add_doctor(commands, _command, _add_gateway)
    recipes = _command(commands, "recipes", "check:recipes", "list the installed recipes")
    verbs = recipes.add_subparsers(title="commands", metavar="COMMAND")
    show = _command(verbs, "show", "check:show_recipe", "print what a recipe sets")
    show.add_argument("name", metavar="NAME")


def _command(commands: Any, name: str, handler: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(handler=handler)
    return parser


def _add_job_file(
    command: argparse.ArgumentParser,
    values: str = "FIELD=VALUE",
    text: str = "override a field, e.g. trainer.optimizer.lr=1e-4",
) -> None:
    command.add_argument("job_file", metavar="JOB.yaml", type=Path)
    command.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar=values,
        help=f"{text}; repeatable",
    )


def _add_data(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--data",
        type=Path,
        default=None,
        metavar="PATH",
        help="file or folder of rows to send with the job, instead of data.path (docs/data.md)",
    )


def _add_allow(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="MODULE:ATTRIBUTE",
        help="a function of an installed module that jobs may name as reward or slot of the "
        "objective (see docs/plugins.md; repeatable; default: none)",
    )
    command.add_argument(
        "--trust",
        action="append",
        default=[],
        type=Path,
        metavar="FOLDER",
        help="a folder of yours with plug-ins, which run as you (see docs/own-code.md#a-loss; "
        "repeatable; default: none)",
    )


def _add_run_dir(command: argparse.ArgumentParser, text: str) -> None:
    command.add_argument("--run-dir", type=Path, default=None, help=text)


def _add_gateway(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--url", default="", help="gateway URL (default: PACELINE_URL, else as for --run-dir)"
    )
    _add_run_dir(
        command,
        "run directory whose gateway to use without a URL; where none runs, commands that only "
        "read show what is stored there (default: PACELINE_RUN_DIR, else runs/local while it "
        "serves, else that of the last run)",
    )
    command.add_argument(
        "--token-file",
        type=Path,
        default=None,
        metavar="FILE",
        help="file with the API token (default: PACELINE_TOKEN, else the run directory's)",
    )
    command.add_argument(
        "--ca",
        type=Path,
        default=None,
        metavar="FILE",
        help="CA certificates to trust for https:// (default: the system's)",
    )


def _add_base(command: argparse.ArgumentParser, port: int | None, text: str) -> None:
    command.add_argument(
        "--port",
        type=int,
        default=port,
        help=f"port of the REST API (default: {text}; 0: any free one)",
    )
    command.add_argument(
        "--store",
        default="",
        metavar="URL",
        help="redis:// or rediss:// URL (default: an embedded store in the run directory)",
    )
    command.add_argument(
        "--pools",
        type=Path,
        metavar="FILE",
        help="YAML: `pools` of rollout workers by name, with their engines (see docs/engines.md)",
    )
    command.add_argument(
        "--worlds",
        type=Path,
        metavar="FILE",
        help="YAML: `worlds`, settings of environments by name (see docs/environment-adapters.md)",
    )
    command.add_argument(
        "--endpoints",
        type=Path,
        metavar="FILE",
        help="YAML: `endpoints`, servers of judges and of models to measure, by name",
    )
    command.add_argument(
        "--limits",
        type=Path,
        metavar="FILE",
        help="YAML: `limits` of tenants and of the installation (see docs/limits.md)",
    )
    _add_allow(command)
    job_commands.add_models(command)
    command.add_argument(
        "--storage",
        default="",
        metavar="URL",
        help="where checkpoints go, such as s3://bucket/prefix (default: the run directory)",
    )
    command.add_argument(
        "--tokenizers",
        choices=("process", "in_process"),
        default="in_process",
        help="process: tokenizers and chat templates run in a sealed process for each job, so that "
        "those of one user hold up nobody else's jobs (default: in_process, see docs/security.md)",
    )
    command.add_argument(
        "--otlp",
        default="",
        metavar="URL",
        help="export traces to, e.g. http://localhost:4317 (OTLP over gRPC; default: none)",
    )
    command.add_argument(
        "--otlp-sample",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="share of episodes that are traced (default: 1)",
    )


def _fail(message: str, code: Exit) -> int:
    say(f"paceline: {message}", error=True)
    return code


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _version() -> str:
    from paceline import __version__

    return f"paceline {__version__}"
