"""What a child does to itself before it reads a program; nothing of it can be undone."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.isolation.sandbox import landlock, seccomp

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_PR_CAPBSET_DROP, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 24, 47, 4
CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SYS_ADMIN = 5, 6, 7, 21
_NOBODY = 65531
_PROCESSES = 256  # with all threads, in a user namespace
_LAST_CAPABILITY = 40
_CAPABILITY_VERSION_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Seals:
    """What holds a child."""

    rules: int  # file descriptor of Landlock's rules
    filter: bytes  # of seccomp; empty: calls are not filtered


def apply(seals: Seals, limits: dict[str, Any], *, own_user: bool) -> None:
    """Apply all seals to this process; `own_user`: it is in a user namespace of its own.

    Raises:
        OSError: the kernel refuses one.
    """
    for name, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, max(limits["output_bytes"], limits["scratch_bytes"])),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_STACK, 8 << 20),
    ):
        resource.setrlimit(name, (int(value), int(value)))
    if own_user:  # elsewhere, those of the same user count too, on the whole machine
        # Besides its own, the process that waits for it and its init.
        most = int(limits["processes"]) + 3 if limits["processes"] else _PROCESSES
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (int(limits["cpu_s"]), int(limits["cpu_s"]) + 1))
    seccomp.no_new_privileges()
    landlock.restrict(seals.rules)
    os.close(seals.rules)
    if seals.filter:
        seccomp.load(seals.filter)


def die_with_parent(parent: int = 0) -> None:
    """End as soon as the thread ends that has started this process.

    `parent`: its number if this process can see it, to end also if it has ended already.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent and os.getppid() != parent:
        os._exit(1)


def first_to_die() -> None:
    """Let the kernel prefer this process and its children when memory is short."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def hide(hidden: bool = True) -> None:
    """Let no process of the same user read the memory of this one."""
    _libc.prctl(_PR_SET_DUMPABLE, 0 if hidden else 1, 0, 0, 0)


def be_nobody() -> None:
    """Change to a user of no other process.

    Raises:
        OSError: it may not, or the namespace has no such user.
    """
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)


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
