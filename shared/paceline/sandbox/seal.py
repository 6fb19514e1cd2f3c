"""What a child does to itself before it reads a program; nothing of it can be undone."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.sandbox import landlock, seccomp

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_PR_CAPBSET_DROP, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 24, 47, 4
CAP_KILL, CAP_SETGID, CAP_SETUID = 5, 6, 7
_LAST_CAPABILITY = 40
_CAPABILITY_VERSION_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Seals:
    """Made once, in the warm process."""

    rules: int  # file descriptor of Landlock's rules
    filter: bytes  # of seccomp


def apply(seals: Seals, limits: dict[str, Any]) -> None:
    """Apply all seals to this process.

    Raises:
        OSError: the kernel refuses one.
    """
    for name, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["output_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_STACK, 8 << 20),
    ):
        resource.setrlimit(name, (int(value), int(value)))
    resource.setrlimit(resource.RLIMIT_CPU, (int(limits["cpu_s"]), int(limits["cpu_s"]) + 1))
    seccomp.no_new_privileges()
    landlock.restrict(seals.rules)
    os.close(seals.rules)
    seccomp.load(seals.filter)


def die_with_parent() -> None:
    """End as soon as the thread ends that has started this process."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def hide() -> None:
    """Let no process of the same user read the memory of this one."""
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def has_capabilities(*numbers: int) -> bool:
    """Whether this process has all of these."""
    status = Path("/proc/self/status").read_text()
    (line,) = (each for each in status.splitlines() if each.startswith("CapEff:"))
    has = int(line.split()[1], 16)
    return all(has >> number & 1 for number in numbers)


def drop_capabilities() -> None:
    """Keep none, whoever the user is, and let none be gained.

    Raises:
        OSError: the kernel refuses it.
    """
    for number in range(_LAST_CAPABILITY + 1):
        _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    if _libc.capset(ctypes.byref(header), ctypes.byref(none)):
        number = ctypes.get_errno()
        raise OSError(number, f"capset: {os.strerror(number)}")
