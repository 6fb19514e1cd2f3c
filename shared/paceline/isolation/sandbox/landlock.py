"""Landlock through its system calls: no file outside a list, no network, no signal to others.

https://docs.kernel.org/userspace-api/landlock.html. Packages on PyPI lack the network and scopes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

# The same on all architectures.
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1
_EXECUTE, _READ_FILE, _READ_DIR, _WRITE_FILE = 1 << 0, 1 << 2, 1 << 3, 1 << 1
# Remove and make files, folders and symbolic links, rename and truncate; no sockets or devices.
_CHANGE = 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 13 | 1 << 14
# Numbers of rights by ABI; the last ones are REFER, TRUNCATE and IOCTL_DEV.
_NUM_FS = {1: 13, 2: 14, 3: 15, 4: 15}
_NUM_FS_NEWEST = 16
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14 | 1 << 15
_NET, _NET_ABI = 0b11, 4  # bind and connect TCP
_SCOPES, SCOPES_ABI = 0b11, 6  # abstract sockets and signals

_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def abi() -> int:
    """The version that the kernel has; 0: none."""
    found = _libc.syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION))
    return max(int(found), 0)


def ruleset(
    *, readable: Iterable[Path], writable: Iterable[Path] = (), has_network: bool = False
) -> int:
    """A file descriptor of rules, for `allow_changes` and `restrict`.

    Paths that do not exist are left out.

    `readable` may be executed too, `writable` are files. `has_network`: TCP is not restricted.

    Raises:
        OSError: the kernel refuses it.
    """
    version = abi()
    rules = _Ruleset(
        _handled(version),
        _NET if version >= _NET_ABI and not has_network else 0,
        _SCOPES if version >= SCOPES_ABI else 0,
    )
    size = 8 if version < _NET_ABI else 16 if version < SCOPES_ABI else 24
    fd = _checked(_libc.syscall(_CREATE, ctypes.byref(rules), ctypes.c_size_t(size), 0))
    for path in readable:
        _allow(fd, path, _EXECUTE | _READ_FILE | _READ_DIR)
    for path in writable:
        _allow(fd, path, _READ_FILE | _WRITE_FILE)
    return fd


def allow_changes(fd: int, folder: Path) -> None:
    """Add a rule: below this folder, files may be made, read and removed, but not executed.

    Raises:
        OSError: the kernel refuses it.
    """
    _allow(fd, folder, _READ_FILE | _READ_DIR | _WRITE_FILE | _CHANGE)


def restrict(fd: int) -> None:
    """Apply rules to this thread and all that come from it; needs no-new-privs.

    Raises:
        OSError: the kernel refuses it.
    """
    _checked(_libc.syscall(_RESTRICT, fd, 0))


def _handled(version: int) -> int:
    return (1 << _NUM_FS.get(version, _NUM_FS_NEWEST)) - 1


def _allow(ruleset_fd: int, path: Path, access: int) -> None:
    access &= _handled(abi())
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        allowed = access if path.is_dir() else access & _OF_FILES
        rule = _PathBeneath(allowed, parent)
        _checked(_libc.syscall(_ADD, ruleset_fd, _PATH_BENEATH, ctypes.byref(rule), 0))
    finally:
        os.close(parent)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"landlock: {os.strerror(number)}")
    return result
