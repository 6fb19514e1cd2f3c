"""Namespaces of one child: a root folder with only what it may read, and a folder of its own.

Level 3 of the sandbox, on top of Landlock, seccomp and limits. It needs no privilege where users
may make user namespaces; in a container the seccomp profile has to allow `CALLS`. See
user_namespaces(7), mount_namespaces(7), pid_namespaces(7) and pivot_root(2).
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from paceline.isolation.sandbox import seal

CALLS = ("clone", "mount", "mount_setattr", "pivot_root", "umount2", "unshare")
"""What container runtimes refuse by default."""
SCRATCH = Path("/tmp")
_SCRATCH_FILES = 1024
_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _SLAVE = 2, 4, 8, 1 << 12, 1 << 14, 1 << 19
_DETACH = 2
_MOUNT_SETATTR = 442  # the same on all architectures
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_AT_RECURSIVE, _RDONLY = 0x8000, 1
# Where the new root is put together: folders that exist, with nothing below that is shown.
_BASES = ("/mnt", "/media", "/srv", "/sys")

_libc = ctypes.CDLL(None, use_errno=True)


class _Attributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clr", "propagation", "userns_fd"))


def isolate(
    readable: Iterable[Path], *, scratch_bytes: int, processes: bool, as_root: bool
) -> None:
    """Move this process into namespaces of its own; it has no capability afterwards.

    `readable`: all that its root has, read-only; paths that do not exist are left out.
    `scratch_bytes`: size of `SCRATCH`, which becomes the working folder; 0: there is none.
    `processes`: what it forks from now on is in a process namespace; see `run_as_init`.
    `as_root`: it has the capabilities to do so without a user namespace, and becomes nobody in one.

    Raises:
        OSError: the kernel refuses it.
    """
    parent = os.getppid()
    proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC)  # which the new root lacks
    if not as_root:
        _enter_user_namespace(proc)
    kinds = _NEWNS | _NEWIPC | _NEWNET | _NEWUTS | _NEWCGROUP
    _checked(_libc.unshare(kinds), "unshare")
    _enter_root(sorted(set(readable)), scratch_bytes)
    if as_root:
        seal.be_nobody()
        _enter_user_namespace(proc)
    os.close(proc)
    if processes:
        _checked(_libc.unshare(_NEWPID), "unshare")
    seal.drop_capabilities()
    seal.die_with_parent(parent)  # which a change of the user undoes


def run_as_init() -> None:
    """Return in the program's process only, the second one of a new process namespace.

    The first one is its init, with whose end all others end. The caller waits for it, and ends as
    the program has.
    """
    held, leash = socket.socketpair()
    if os.fork():
        leash.close()
        _end_as_told(held)
    held.close()
    seal.die_with_parent()
    if select.select([leash], [], [], 0)[0]:  # the caller had ended before
        os._exit(1)
    if program := os.fork():
        os.closerange(0, leash.fileno())
        pid, status = os.wait()
        while pid != program:  # it is also the parent of what others leave behind
            pid, status = os.wait()
        leash.send(status.to_bytes(4, "big"))
        os._exit(0)
    leash.close()
    seal.die_with_parent()


def _end_as_told(held: socket.socket) -> None:
    """Exit with the code, or by the signal, that the init reports."""
    os.closerange(0, held.fileno())
    told = held.recv(4)  # nothing, if the init was killed
    status = int.from_bytes(told, "big") if told else signal.SIGKILL
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _enter_user_namespace(proc: int) -> None:
    user, group = os.getuid(), os.getgid()
    seal.hide(False)  # the maps of a hidden process belong to root
    _checked(_libc.unshare(_NEWUSER), "unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        file = os.open(f"{os.getpid()}/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)
    seal.hide()


def _enter_root(readable: list[Path], scratch_bytes: int) -> None:
    os.umask(0o022)  # its folders are for nobody
    places = [*readable, *(path.resolve() for path in readable)]
    base = next(each for each in _bases() if not any(p.is_relative_to(each) for p in places))
    _checked(_libc.mount(None, b"/", None, ctypes.c_ulong(_REC | _SLAVE), None), "mount /")
    _mount("tmpfs", base, "tmpfs", _NOSUID | _NODEV, "size=256k,nr_inodes=4k,mode=755")
    os.chdir(base)
    if scratch_bytes:
        scratch = base / SCRATCH.relative_to("/")
        scratch.mkdir()
        limits = f"size={scratch_bytes},nr_inodes={_SCRATCH_FILES},mode=777"
        _mount("tmpfs", scratch, "tmpfs", _NOSUID | _NODEV | _NOEXEC, limits)
    for path in _outermost(readable):  # some may lie in the scratch folder
        _show(path, base)
    pivot_root = _PIVOT_ROOT[os.uname().machine]
    _checked(_libc.syscall(pivot_root, b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", _DETACH), "umount2")
    os.chdir("/")
    _set_attributes(Path("/"), _Attributes(set=_RDONLY), _AT_RECURSIVE)
    if scratch_bytes:
        _set_attributes(SCRATCH, _Attributes(clr=_RDONLY))
        os.chdir(SCRATCH)


def _set_attributes(path: Path, attributes: _Attributes, flags: int = 0) -> None:
    reference, size = ctypes.byref(attributes), ctypes.c_size_t(ctypes.sizeof(attributes))
    result = _libc.syscall(_MOUNT_SETATTR, -1, os.fsencode(path), flags, reference, size)
    _checked(result, "mount_setattr")


def _bases() -> Iterator[Path]:
    return (Path(each) for each in _BASES if Path(each).is_dir())


def _outermost(paths: list[Path]) -> Iterator[Path]:
    """Of sorted paths those that lie in no other."""
    last: Path | None = None
    for path in paths:
        if last is None or not path.is_relative_to(last):
            yield path
            last = path


def _show(path: Path, base: Path) -> None:
    """Make a path visible below the new root: as the symbolic link that it is, or mounted."""
    place = base / path.relative_to("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        place.symlink_to(path.readlink())
    elif path.is_dir():
        place.mkdir(exist_ok=True)
        _mount(str(path), place, "", _BIND | _REC, "")
    elif path.exists():
        place.touch()
        _mount(str(path), place, "", _BIND, "")


def _mount(source: str, target: Path, kind: str, flags: int, options: str) -> None:
    texts = [os.fsencode(each) for each in (source, target, kind)]
    _checked(_libc.mount(*texts, ctypes.c_ulong(flags), options.encode()), f"mount {target}")


def _checked(result: int, name: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
