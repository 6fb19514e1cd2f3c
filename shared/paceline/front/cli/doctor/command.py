"""Runs the checks and prints what they find."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from paceline.front.cli.check import read_job
from paceline.front.cli.doctor import installation, machine
from paceline.front.cli.doctor.cluster import cluster
from paceline.front.cli.doctor.finding import Condition, Finding, note, ok
from paceline.front.cli.needs.memory import lower, needs, total, words
from paceline.front.cli.target.run_dirs import run_dir_of
from paceline.front.cli.terminal.console import SafeConsole
from paceline.front.cli.terminal.printing import say
from paceline.models.memory import UNKNOWN_SIZE
from paceline.platform.text import human_bytes, visible

_STYLES = {Condition.OK: "green", Condition.NOTE: "yellow", Condition.BROKEN: "bold red"}
_MARKS = {Condition.OK: "✓", Condition.NOTE: "!", Condition.BROKEN: "✗"}


def doctor(arguments: Namespace) -> int:
    """`paceline doctor`: a line per finding; 1 if something that was asked for does not work."""
    console = SafeConsole()
    findings: list[Finding] = []
    for finding in _checks(arguments):
        findings.append(finding)
        if not arguments.json:
            console.print(line(finding), soft_wrap=True)
    is_well = all(finding.condition is not Condition.BROKEN for finding in findings)
    if arguments.json:
        say(json.dumps({"ok": is_well, "findings": [asdict(finding) for finding in findings]}))
    return 0 if is_well else 1


def line(finding: Finding) -> Text:
    """A finding, and below it what mends it."""
    text = Text(f"{_MARKS[finding.condition]} ", _STYLES[finding.condition])
    text.append(f"{finding.name}: ", "bold")
    text.append(visible(finding.detail))
    if finding.mend:
        text.append("\n    → ", "dim")
        text.append(visible(finding.mend), "cyan")
    return text


def memory(job_file: Path) -> Finding:
    """Whether a job has room on this machine.

    Raises:
        ConfigError: it is no job file.
    """
    found = needs(read_job(job_file, []))
    if not found:
        return note("memory", f"{job_file}: it is not known: {UNKNOWN_SIZE}")
    here, text = machine.memory_bytes(), f"{job_file}: {words(found)}"
    if here and total(found) > here:
        text = f"{text}; this machine has {human_bytes(here)}: lower it with {lower(found)}"
        return note("memory", text)
    return ok("memory", text)


def _checks(arguments: Namespace) -> Iterator[Finding]:
    if arguments.cluster:
        yield from cluster(arguments.namespace)
        return
    yield machine.cores()
    if arguments.job:
        yield memory(arguments.job)
    yield machine.precision()
    yield machine.gpus()
    yield machine.engines()
    yield from machine.roles()
    yield machine.sandbox()
    yield from machine.disk(run_dir_of(arguments))
    yield machine.files()
    yield installation.store(arguments.store) if arguments.store else installation.embedded_store()
    yield installation.port()
    yield installation.hub()
    yield from installation.gateway(arguments)
