"""A filter of system calls, compiled once by libseccomp and loaded by each child.

An allowlist: what a program of one process needs that computes, reads the standard library and
talks to itself. Everything else fails as if it were forbidden.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any

ALLOWED = frozenset(
    """
    access alarm arch_prctl brk chdir clock_getres clock_gettime clock_nanosleep close close_range
    copy_file_range dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2
    epoll_wait eventfd eventfd2 exit exit_group faccessat faccessat2 fadvise64 fchdir fdatasync
    flock fstat fstatfs fsync ftruncate futex futex_waitv get_robust_list getcpu getcwd getdents
    getdents64 getegid geteuid getgid getgroups getitimer getpeername getpgid getpgrp getpid getppid
    getpriority getrandom getresgid getresuid getrlimit getrusage getsid getsockname getsockopt
    gettid gettimeofday getuid getxattr lseek lstat madvise membarrier mincore mmap mprotect mremap
    msync munmap nanosleep newfstatat open openat openat2 pause pipe pipe2 poll ppoll pread64 preadv
    preadv2 pselect6 pwrite64 pwritev pwritev2 read readlink readlinkat readv recvfrom recvmmsg
    recvmsg restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn
    rt_sigsuspend rt_sigtimedwait sched_get_priority_max sched_get_priority_min sched_getaffinity
    sched_getparam sched_getscheduler sched_yield select sendfile sendmmsg sendmsg sendto
    set_robust_list set_tid_address setitimer setsockopt shutdown sigaltstack signalfd4
    stat statfs statx sysinfo time timer_create timer_delete timer_getoverrun timer_gettime
    timer_settime timerfd_create timerfd_gettime timerfd_settime times umask uname wait4 waitid
    write writev
    """.split()  # noqa: SIM905  # a list of literals would be 140 lines
)
"""By their names on x86-64 and aarch64; those that an architecture lacks are left out."""

_FILES = frozenset(
    """
    fallocate link linkat mkdir mkdirat rename renameat renameat2 rmdir symlink symlinkat truncate
    unlink unlinkat
    """.split()  # noqa: SIM905
)
"""Also allowed to a program that has a folder to write in."""
_PROCESSES = frozenset(("execve", "execveat", "fork", "setpgid", "setsid", "vfork"))
"""Also allowed to a program that may have further processes."""
_DENIED = {
    "clone3": errno.ENOSYS,  # glibc then uses clone, whose flags can be seen
    "memfd_create": errno.ENOSYS,
    "socket": errno.EACCES,
    "connect": errno.EACCES,
    "bind": errno.EACCES,
}
_PRETENDED = ("chmod", "fchmod", "fchmodat", "utimensat")  # shutil asks for them after a copy
_OF_OTHERS = ("prlimit64", "sched_setaffinity")
_PR_SET_NAME, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 15, 38, 22
_FILTER = 2
_AF_UNIX, _SOCK_STREAM = 1, 1
_CLONE_THREAD = 0x10000
_CLONE_NAMESPACES = 0x7E020000
# FIOCLEX, FIONCLEX, FIONBIO, FIONREAD; TCGETS and TIOCGWINSZ, which fail unless it is a terminal.
_IOCTL = (0x5451, 0x5450, 0x5421, 0x541B, 0x5401, 0x5413)
# F_DUPFD to F_SETLKW, F_DUPFD_CLOEXEC, F_GETPIPE_SZ; not F_SETOWN, which signals others.
_FCNTL = (*range(8), 1030, 1032)

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def compiled(*, signals_are_scoped: bool, files: bool = False, processes: bool = False) -> bytes:
    """The filter as instructions of the kernel's machine.

    `signals_are_scoped`: Landlock keeps signals inside; if not, none can be sent. `files`: it has
    a folder to write in. `processes`: it may have further processes.

    Raises:
        OSError: libseccomp is missing or refuses a rule.
    """
    import pyseccomp as lib

    made: Any = lib.SyscallFilter(lib.ERRNO(errno.EPERM))
    more = (_FILES if files else frozenset[str]()) | (_PROCESSES if processes else frozenset[str]())
    for name in sorted(ALLOWED | more):
        _add(lib, made, lib.ALLOW, name)
    for name, number in _DENIED.items():
        _add(lib, made, lib.ERRNO(number), name)
    for name in _PRETENDED:
        _add(lib, made, lib.ERRNO(0), name)
    for name in _OF_OTHERS:
        _add(lib, made, lib.ALLOW, name, lib.Arg(0, lib.EQ, 0))
    # Not of datagrams: these reach any socket whose path is writable, without connect.
    family, kind = lib.Arg(0, lib.EQ, _AF_UNIX), lib.Arg(1, lib.MASKED_EQ, 0xF, _SOCK_STREAM)
    _add(lib, made, lib.ALLOW, "socketpair", family, kind)
    if signals_are_scoped:
        for name in ("kill", "tkill", "tgkill"):
            _add(lib, made, lib.ALLOW, name)
    threads = lib.Arg(0, lib.MASKED_EQ, _CLONE_THREAD, _CLONE_THREAD)
    anything = lib.Arg(0, lib.MASKED_EQ, _CLONE_NAMESPACES, 0)
    _add(lib, made, lib.ALLOW, "clone", anything if processes else threads)
    _add(lib, made, lib.ALLOW, "prctl", lib.Arg(0, lib.EQ, _PR_SET_NAME))
    for name, second in (("ioctl", _IOCTL), ("fcntl", _FCNTL)):
        for each in second:
            _add(lib, made, lib.ALLOW, name, lib.Arg(1, lib.EQ, each))
    return _exported(made)


def load(program: bytes) -> None:
    """Apply a filter to this process for good; also sets no-new-privs.

    Raises:
        OSError: the kernel refuses it.
    """
    no_new_privileges()
    code = ctypes.create_string_buffer(program, len(program))
    what = _Program(len(program) // 8, ctypes.cast(code, ctypes.c_void_p))
    if _libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.byref(what), 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")


def no_new_privileges() -> None:
    """Let no program that this process starts gain privileges."""
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _add(lib: Any, made: Any, action: int, name: str, *arguments: Any) -> None:
    if lib.resolve_syscall(lib.Arch.NATIVE, name) >= 0:
        made.add_rule(action, name, *arguments)


def _exported(made: Any) -> bytes:
    fd = os.memfd_create("seccomp")
    with os.fdopen(fd, "w+b") as file:
        made.export_bpf(file)
        file.seek(0)
        return file.read()
