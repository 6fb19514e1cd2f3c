"""Runs Python programs in forks of this process, which has imported what trainers import.

In a process of its own, each would spend most of its time on these imports. A line of standard
input is a command, as JSON; the answer is the id of the process. Its exit code goes to a file.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

IMPORTED = [
    "torch.distributed.argparse_util",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "transformers.models.llama.modeling_llama",
    "paceline_trainer.service",
]


def main() -> None:
    """Run commands until standard input ends; a fork returns into its program."""
    gc.disable()  # what is imported stays
    for module in IMPORTED:
        importlib.import_module(module)
    gc.enable()
    gc.freeze()  # else every fork would walk, and so copy, all that was imported
    for line in sys.stdin:
        command = json.loads(line)
        if os.fork():
            continue
        # One process per command waits for it, so that this one can wait for the next command.
        pid = os.fork()
        if not pid:
            _run(command)
            return
        os.write(1, f"{pid}\n".encode())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        path = Path(command["code"])
        path.with_suffix(".part").write_text(str(code))
        path.with_suffix(".part").rename(path)
        os._exit(0)
    with suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)  # to take apart what was imported takes seconds


def _run(command: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(command["environment"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(command["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    arguments: list[str] = command["arguments"]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
