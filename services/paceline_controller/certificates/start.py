"""Command line of the issuer."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.config.load import load
from paceline.config.service import LogSettings
from paceline.errors import ConfigError, PacelineError, UnavailableError
from paceline.platform.telemetry import logs
from paceline.platform.telemetry.logs import Log
from paceline_controller.certificates.config import Issue
from paceline_controller.certificates.run import run
from paceline_controller.certificates.secrets import Secrets

log = Log("certificates")


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0 done, 1 failed or refused, 2 invalid configuration, 3 API server unreachable."""
    parser = argparse.ArgumentParser("python -m paceline_controller.certificates")
    parser.add_argument("file", type=Path, metavar="ISSUE.yaml", help="what to issue")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="one field, above the file: --set namespace=training",
    )
    chosen = parser.parse_args(arguments)
    # As PID 1 of a container, the process would ignore SIGTERM without a handler.
    signal.signal(signal.SIGTERM, _end)
    logs.setup(LogSettings())
    try:
        issue = load(Issue, chosen.file, overrides=chosen.set)
        written = run(issue, Secrets.connect(issue))
    except PacelineError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        if isinstance(error, UnavailableError):
            return 3
        return 2 if isinstance(error, ConfigError) else 1
    log.info("all certificates are in order", namespace=issue.namespace, written=written)
    return 0


def _end(number: int, frame: object) -> None:
    sys.exit(128 + number)
