"""GPUs that a job would get, in words: `plan`, and lines of `validate` and `run`."""

from __future__ import annotations

import json
from argparse import Namespace

from paceline.config.precision import with_dtype
from paceline.front.cli.check import allowed_targets, check, read_job
from paceline.front.cli.entry import Exit
from paceline.front.cli.terminal.printing import say
from paceline.front.local.devices.device import described
from paceline.front.local.devices.discovery import devices_here
from paceline.front.local.devices.report import plan_of


def plan(arguments: Namespace) -> int:
    """`paceline plan JOB.yaml`: on this machine, or on one that `--devices` describes."""
    spec = read_job(arguments.job_file, arguments.overrides)
    check(spec, allowed_targets(arguments))
    devices = described(arguments.devices) if arguments.devices else devices_here()
    planned = plan_of(with_dtype(spec, "auto"), devices)
    if arguments.json:
        say(json.dumps(planned.document(), indent=2))
    else:
        for line in planned.lines():
            say(line)
    return Exit.INPUT if planned.refusal else Exit.OK
