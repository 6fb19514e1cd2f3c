"""Runs one container: makes its namespaces, root, mounts and user, then waits for it.

Executed by path, using only the standard library: `python -I -S shim.py SPEC FD`. SPEC is the JSON
file of `Spec` in `container.py`. FD receives the container's process id, a newline, and the reason
if it could not be executed. Exits with the container's exit code, 128 + n after signal n.

The container is process 1 of a PID namespace, so that none of its processes outlives it. Its root
is the machine's with an overlay in memory: it may write anywhere without changing the machine.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any

_NEWNS, _NEWUTS, _NEWIPC, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
_RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 32, 4096, 16384, 1 << 18
_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_NO_NEW_PRIVILEGES = 38
_HOST = "/.host"  # mount point of the machine's root while the container's is built
_MASKED = ("/tmp", "/run")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_CANNOT_START = 128

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    """Start the container and wait for it."""
    spec_path, report = sys.argv[1], int(sys.argv[2])
    with open(spec_path, encoding="utf-8") as file:
        spec = json.load(file)
    _enter(spec)
    child = os.fork()
    if child == 0:
        _become(spec, report)
    os.write(report, f"{child}\n".encode())
    os.close(report)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: os.kill(child, n))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _enter(spec: dict[str, Any]) -> None:
    network = os.open(spec["network"], os.O_RDONLY | os.O_CLOEXEC)
    _call("setns", _libc.setns(network, _NEWNET))
    _call("unshare", _libc.unshare(_NEWNS | _NEWPID | _NEWUTS | _NEWIPC))
    name = spec["hostname"].encode()
    _call("sethostname", _libc.sethostname(name, len(name)))
    _mount(None, "/", None, _REC | _PRIVATE)


def _become(spec: dict[str, Any], report: int) -> None:
    try:
        os.set_inheritable(report, False)
        _build_root(spec["scratch"])
        _bind_all(spec["binds"])
        for target, source in spec["links"].items():
            _relink(target, source)
        _close_root(spec)
        _drop(spec)
        os.chdir(spec["directory"])
        os.execvpe(spec["command"][0], spec["command"], spec["environment"])
    except (OSError, KeyError) as error:
        os.write(report, f"{error}".encode())
    os._exit(_CANNOT_START)


def _build_root(scratch: str) -> None:
    """Mount the machine's root under an overlay in memory, with own /dev, /proc, /sys, ..."""
    _mount("tmpfs", scratch, "tmpfs", 0, "mode=755")
    for name in ("upper", "work", "root"):
        os.mkdir(f"{scratch}/{name}")
    os.chmod(f"{scratch}/upper", 0o755)
    layers = f"lowerdir=/,upperdir={scratch}/upper,workdir={scratch}/work"
    _mount("overlay", f"{scratch}/root", "overlay", 0, layers)
    os.mkdir(f"{scratch}/root{_HOST}")
    os.chdir(f"{scratch}/root")
    number = _PIVOT_ROOT[os.uname().machine]
    _call("pivot_root", _libc.syscall(number, b".", f".{_HOST}".encode()))
    os.chdir("/")
    for masked in _MASKED:
        _mount("tmpfs", masked, "tmpfs", 0, "mode=1777")
    _mount("proc", "/proc", "proc", 0)
    _mount("sysfs", "/sys", "sysfs", _RDONLY)
    _mount("tmpfs", "/dev", "tmpfs", 0, "mode=755")
    for device in _DEVICES:
        _bind(f"/dev/{device}", f"/dev/{device}", read_only=False)
    os.mkdir("/dev/shm")
    _mount("tmpfs", "/dev/shm", "tmpfs", 0, "mode=1777,size=67108864")
    for name, number in {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}.items():
        os.symlink(f"/proc/self/fd{number}", f"/dev/{name}")


def _bind_all(binds: list[dict[str, Any]]) -> None:
    for bind in binds:
        _bind(bind["source"], bind["target"], read_only=bind["read_only"])


def _bind(source: str, target: str, *, read_only: bool) -> None:
    """Bind a path of the machine's root to one of the container's, creating the mount point."""
    source = _HOST + source
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.lexists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, target, None, _BIND | _REC)
    if read_only:
        _mount(None, target, None, _REMOUNT | _BIND | _RDONLY)


def _relink(target: str, source: str) -> None:
    if os.path.lexists(target):
        os.unlink(target)
    os.symlink(source, target)


def _close_root(spec: dict[str, Any]) -> None:
    """Unmount the machine's root; make everything but volumes read-only if asked."""
    _call("umount", _libc.umount2(_HOST.encode(), _DETACH))
    os.rmdir(_HOST)
    if not spec["read_only_root"]:
        return
    volumes = {bind["target"].rstrip("/") for bind in spec["binds"]}
    for path in ("/", *_MASKED):
        if path not in volumes:
            _mount(None, path, None, _REMOUNT | _BIND | _RDONLY)


def _drop(spec: dict[str, Any]) -> None:
    if spec["no_new_privileges"]:
        _call("prctl", _libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    os.setgroups(spec["groups"])
    os.setgid(spec["gid"])
    os.setuid(spec["uid"])


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    done = _libc.mount(*words, ctypes.c_ulong(flags), data.encode() or None)
    _call(f"mount {source} on {target}", done)


def _call(what: str, result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    code = main()
    sys.exit(code if code >= 0 else 128 - code)
