"""Programs that nobody trusts: what they may use, and what came of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """Limits of one program. Whatever exceeds them is killed."""

    time_s: float = 10.0  # wall clock
    cpu_s: int = 10
    memory_bytes: int = 512 << 20  # of the address space, with about 100 MiB of the interpreter
    output_bytes: int = 64 << 10  # of its standard output
    open_files: int = 64
    processes: int = 0  # further ones; more than 0 needs namespaces
    scratch_bytes: int = 0  # of a folder to write in, `/tmp`; more than 0 needs namespaces


class ProgramEnding(StrEnum):
    """How a program has ended."""

    EXITED = "exited"
    KILLED = "killed"  # by a signal that is not ours: a crash, or the limit of CPU time
    TIMEOUT = "timeout"
    OUTPUT = "output"  # it wrote too much


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """What a program has written, and how it ended; it may have written anything."""

    ending: ProgramEnding
    code: int  # exit code, or number of the signal
    stdout: bytes
    stderr: bytes  # its end
    seconds: float


class Programs(Protocol):
    """Runs programs where they can harm nobody."""

    async def run(self, source: str, *, stdin: bytes, limits: ProgramLimits) -> ProgramOutcome:
        """Run a Python program to its end.

        Raises:
            UnavailableError: programs cannot be contained here.
        """
        ...
