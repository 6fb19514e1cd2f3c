"""Runs Python scripts as processes that are forked from one with their imports.

    python benchmarks/rig/forked.py COMMANDS.json MODULE ...

The file has a list of stages, lists of commands that run beside each other, a few at a time: `argv`
and the path of the `log`. Each that ends prints a line of JSON: `argv`, `code`, `seconds`, and
`cpu_s` with its children.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.platform.program import importing, leaving

BESIDE = 3
Command = dict[str, Any]


def main(path: str, modules: Sequence[str]) -> None:
    """Import the modules and run the commands; a child returns into its script."""
    stages: list[list[Command]] = json.loads(Path(path).read_text())
    with importing():  # else each fork would walk, and so copy, all that was imported
        for module in modules:
            importlib.import_module(module)
    for stage in stages:
        running: dict[int, tuple[Command, float]] = {}
        for command in stage:
            if len(running) == BESIDE:
                _wait(running)
            sys.stdout.flush()
            pid = os.fork()
            if not pid:
                _run(command)
                return
            running[pid] = (command, time.monotonic())
        while running:
            _wait(running)


def _wait(running: dict[int, tuple[Command, float]]) -> None:
    pid, status, used = os.wait4(-1, 0)
    command, began = running.pop(pid)
    ended = {
        "argv": command["argv"],
        "code": os.waitstatus_to_exitcode(status),
        "seconds": round(time.monotonic() - began, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
    }
    print(json.dumps(ended), flush=True)


def _run(command: Command) -> None:
    with open(command["log"], "ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.argv = command["argv"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    with leaving():
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
