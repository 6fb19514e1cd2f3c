"""Programs that attack what is around them, judged by what is outside, not by what they say."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from paceline.isolation.sandbox import landlock
from paceline.isolation.sandbox.sandbox import Sandbox
from paceline.plugins import ProgramLimits

pytestmark = [
    pytest.mark.skipif(not landlock.abi(), reason="this kernel has no Landlock"),
    pytest.mark.asyncio(loop_scope="module"),
]
SECRET = "the-token-of-the-service"
SHARED = Path(f"/dev/shm/paceline-escaped-{os.getpid()}")
SEGMENTS, KEY = Path("/proc/sysvipc/shm"), "4711"
# Notes SIGURG, which everybody else ignores.
VICTIM = """
import pathlib, signal, sys
signal.signal(signal.SIGURG, lambda *_: pathlib.Path(sys.argv[1]).touch())
print("ready", flush=True)
sys.stdin.read()
"""


@dataclass(slots=True)
class Outside:
    """What a program must neither read nor change."""

    folder: Path
    victim: subprocess.Popen[bytes]
    tcp: socket.socket
    udp: socket.socket
    abstract: socket.socket
    path: socket.socket
    datagrams: socket.socket
    named: socket.socket
    before: dict[str, object] = field(default_factory=dict[str, object])

    def names(self) -> dict[str, object]:
        """What an attacker knows already."""
        return {
            "FOLDER": str(self.folder),
            "VICTIM": self.victim.pid,
            "SERVICE": os.getpid(),
            "TCP": self.tcp.getsockname()[1],
            "UDP": self.udp.getsockname()[1],
            "ABSTRACT": self.abstract.getsockname().decode(),
            "PATH": str(self.folder / "socket"),
            "DATAGRAMS": str(self.folder / "datagrams"),
            "NAMED": self.named.getsockname().decode(),
        }

    def listeners(self) -> tuple[socket.socket, ...]:
        """Where nothing may arrive."""
        return self.tcp, self.udp, self.abstract, self.path, self.datagrams, self.named

    def state(self) -> dict[str, object]:
        """What shows a change."""
        victim = psutil.Process(self.victim.pid)
        files = {
            str(each.relative_to(self.folder)): (each.lstat().st_mode, each.lstat().st_mtime_ns)
            for each in sorted(self.folder.rglob("*"))
        }
        return {
            "victim": (victim.status() != psutil.STATUS_ZOMBIE, victim.nice()),
            "affinity": victim.cpu_affinity(),
            "limits": [victim.rlimit(each) for each in (psutil.RLIMIT_CPU, psutil.RLIMIT_NOFILE)],
            "files": files,
            "content": (self.folder / "secret").read_text(),
            # Others on the machine have files and segments there, which come and go.
            "shared memory": SHARED.exists(),
            "segment": KEY in [line.split()[0] for line in SEGMENTS.read_text().splitlines()],
            "received": [_received(each) for each in self.listeners()],
            "children": len(psutil.Process().children(recursive=True)),
        }


def _received(listener: socket.socket) -> bool:
    listener.setblocking(False)
    with suppress(BlockingIOError):
        if listener.type == socket.SOCK_DGRAM:
            return bool(listener.recv(1))
        listener.accept()
        return True
    return False


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    tmp_path.chmod(0o777)
    for name in ("secret", "script.sh"):
        (tmp_path / name).write_text(SECRET)
        (tmp_path / name).chmod(0o777)
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(tmp_path / "signalled")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"TOKEN": SECRET},
    )
    assert victim.stdout is not None
    victim.stdout.readline()
    listeners = (
        socket.socket(),
        socket.socket(type=socket.SOCK_DGRAM),
        socket.socket(socket.AF_UNIX),
        socket.socket(socket.AF_UNIX),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
    )
    addresses = (
        *(("127.0.0.1", 0), ("127.0.0.1", 0)),
        *(f"\0paceline-{os.getpid()}", str(tmp_path / "socket")),
        *(str(tmp_path / "datagrams"), f"\0datagrams-{os.getpid()}"),
    )
    for each, address in zip(listeners, addresses, strict=True):
        each.bind(address)
        if each.type == socket.SOCK_STREAM:
            each.listen()
    for name in ("socket", "datagrams"):
        (tmp_path / name).chmod(0o777)
    yield Outside(tmp_path, victim, *listeners)
    victim.kill()
    victim.communicate()
    for each in listeners:
        each.close()


FREE = ProgramLimits(time_s=20.0, output_bytes=1 << 20)
HELD = {
    "level 2": (2, FREE),
    "level 3": (3, FREE),
    "level 3, files and processes": (3, replace(FREE, scratch_bytes=1 << 20, processes=16)),
}


@pytest.fixture(scope="module", params=HELD)
def held(request: pytest.FixtureRequest) -> tuple[int, ProgramLimits]:
    return HELD[request.param]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox(held: tuple[int, ProgramLimits]) -> AsyncIterator[Sandbox]:
    """One for all attacks: what one does to the warm process, the next one would notice."""
    made = Sandbox(highest=held[0])
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TOKEN", SECRET)
        level = await made.level()
    if level.number < held[0]:
        pytest.skip(f"level {held[0]} does not hold here: {level.why}")
    yield made
    await made.close()


ATTACKS = {
    "forks": "import os\nfor _ in range(400): t(os.fork)",
    "forks otherwise": """
        import ctypes
        libc = ctypes.CDLL(None)
        for number in (56, 57, 58, 435, 220): t(libc.syscall, number, 17, 0, 0, 0, 0)""",
    "starts programs": """
        import os, subprocess
        t(subprocess.run, ["/bin/sh", "-c", f"echo x > {FOLDER}/new"])
        t(os.execv, "/bin/sh", ["sh", "-c", f"echo x > {FOLDER}/new"])
        t(os.posix_spawn, "/bin/sh", ["sh", "-c", f"echo x > {FOLDER}/new"], {})""",
    "reads files": """
        for path in (f"{FOLDER}/secret", "/etc/passwd", f"/proc/{SERVICE}/environ",
                     f"/proc/{VICTIM}/environ", "/proc/self/environ", f"/proc/{SERVICE}/mem",
                     "/proc/1/environ", "/root/.bashrc"):
            print(t(lambda: open(path, "rb").read(4096)))""",
    "lists folders": """
        import os
        for path in (FOLDER, "/", "/root", "/home", "/tmp", "/proc", f"/proc/{SERVICE}/fd"):
            print(t(os.listdir, path))""",
    "reads through a link": """
        import os
        t(os.symlink, f"{FOLDER}/secret", f"{FOLDER}/link")
        t(os.link, f"{FOLDER}/secret", f"{FOLDER}/hard")
        print(t(lambda: open(f"/proc/self/root{FOLDER}/secret").read()))""",
    "writes files": """
        import os
        t(lambda: open(f"{FOLDER}/secret", "w").write("x"))
        t(lambda: open(f"{FOLDER}/new", "w").write("x"))
        t(lambda: open(f"/dev/shm/paceline-escaped-{SERVICE}", "w").write("x"))
        t(lambda: open(f"/tmp/paceline-escaped-{SERVICE}", "w").write("x"))
        t(os.truncate, f"{FOLDER}/secret", 0)
        t(os.unlink, f"{FOLDER}/secret"); t(os.rename, f"{FOLDER}/secret", f"{FOLDER}/moved")
        t(os.mkdir, f"{FOLDER}/folder"); t(os.mkfifo, f"{FOLDER}/fifo")""",
    "changes metadata": """
        import os
        t(os.chmod, f"{FOLDER}/secret", 0); t(os.utime, f"{FOLDER}/secret", (0, 0))
        t(os.chown, f"{FOLDER}/secret", 0, 0)
        t(os.setxattr, f"{FOLDER}/secret", "user.x", b"x")""",
    "signals": """
        import os, signal
        for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP): t(os.kill, VICTIM, number)
        for pid in (SERVICE, os.getppid(), -1, 1): t(os.kill, pid, signal.SIGURG)
        t(lambda: signal.pidfd_send_signal(os.pidfd_open(VICTIM), 9))""",
    "signals by a file": """
        import fcntl, os
        read, write = os.pipe()
        t(fcntl.fcntl, read, fcntl.F_SETOWN, VICTIM); t(fcntl.fcntl, read, fcntl.F_SETSIG, 9)
        t(fcntl.fcntl, read, fcntl.F_SETFL, os.O_ASYNC); os.write(write, b"x")""",
    "changes limits of others": """
        import os, resource
        t(resource.prlimit, VICTIM, resource.RLIMIT_CPU, (0, 0))
        t(resource.prlimit, SERVICE, resource.RLIMIT_NOFILE, (3, 3))
        t(os.sched_setaffinity, VICTIM, {0}); t(os.setpriority, os.PRIO_PROCESS, VICTIM, 19)
        t(os.setpriority, os.PRIO_USER, 0, 19); t(os.setpriority, os.PRIO_PGRP, 0, 19)""",
    "raises its own limits": """
        import resource
        for each in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE):
            t(resource.setrlimit, each, (-1, -1))
        x = bytearray(10 ** 9); print("escaped")""",
    "reads memory of others": """
        import ctypes
        libc = ctypes.CDLL(None)
        t(libc.ptrace, 16, VICTIM, 0, 0); t(libc.ptrace, 16, SERVICE, 0, 0)
        buffer = ctypes.create_string_buffer(64)
        vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 64)
        t(libc.process_vm_readv, SERVICE, vector, 1, vector, 1, 0)""",
    "connects": """
        import socket
        for family, kind, address in (
            (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", TCP)),
            (socket.AF_INET, socket.SOCK_STREAM, ("169.254.169.254", 80)),
            (socket.AF_UNIX, socket.SOCK_STREAM, ABSTRACT),
            (socket.AF_UNIX, socket.SOCK_STREAM, PATH),
        ):
            t(lambda: socket.socket(family, kind).connect(address))
        t(lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", UDP)))
        t(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))
        for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
            for address in (ABSTRACT, PATH, DATAGRAMS, NAMED, "/dev/log"):
                t(lambda: socket.socketpair(type=kind)[0].sendto(b"x", address))""",
    "listens": """
        import socket
        t(lambda: socket.create_server(("127.0.0.1", 0))); t(socket.socketpair)
        t(lambda: socket.socket(socket.AF_UNIX).bind(f"{FOLDER}/other"))""",
    "leaves memory behind": """
        import ctypes, multiprocessing.shared_memory as shared
        libc = ctypes.CDLL(None)
        t(lambda: shared.SharedMemory("escaped", create=True, size=10))
        t(libc.shmget, 4711, 4096, 0o1666); t(libc.msgget, 4711, 0o1666)
        t(libc.semget, 4711, 1, 0o1666); t(libc.mq_open, b"/escaped", 0o102, 0o666, None)""",
    "gains privileges": """
        import ctypes, os
        libc = ctypes.CDLL(None)
        t(os.setuid, 0); t(os.setgroups, [0]); t(libc.unshare, 0x10000000)
        t(libc.mount, b"none", b"/", b"tmpfs", 0, None); t(os.chroot, "/"); t(libc.setns, 0, 0)
        t(libc.prctl, 38, 0, 0, 0, 0); t(libc.prctl, 4, 1, 0, 0, 0); t(libc.personality, 8)
        t(libc.sethostname, b"x", 1); t(libc.keyctl, 0, 0)""",
    "uses descriptors": """
        import os
        for fd in range(3, 64):
            t(os.write, fd, b'{"ready": true}'); print(t(os.read, fd, 4096))""",
    "reads what came before": """
        import ctypes, gc, sys, os
        found = [x for x in gc.get_objects() if isinstance(x, dict) and "TOKEN" in x]
        print(os.environ, sys.argv, found)
        frame = sys._getframe()
        while frame: print(list(frame.f_locals)); frame = frame.f_back""",
    # By numbers of x86-64: userfaultfd, add_key, keyctl, io_uring_setup, bpf, perf_event_open,
    # init_module, finit_module, kexec_load, syslog, settimeofday, clock_settime, inotify_init,
    # inotify_init1, fanotify_init, memfd_create, memfd_secret, open_tree, fsopen, swapon, quotactl,
    # acct, kcmp, process_madvise, pidfd_getfd, iopl, landlock_create_ruleset, name_to_handle_at.
    "asks the kernel for more": """
        import ctypes, os
        libc = ctypes.CDLL(None)
        numbers = (323, 248, 250, 425, 321, 298, 175, 313, 246, 103, 164, 227, 253, 294, 300, 319,
                   447, 428, 430, 167, 179, 163, 312, 440, 438, 172, 444, 303)
        for number in numbers if os.uname().machine == "x86_64" else ():
            if libc.syscall(number, 0, 0, 0, 0, 0, 0) >= 0: print("escaped by", number)""",
    "opens devices and other sockets": """
        import fcntl, os, socket
        for family in (socket.AF_INET6, socket.AF_PACKET, socket.AF_VSOCK, socket.AF_ALG):
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
                if isinstance(t(socket.socket, family, kind), socket.socket): print("escaped")
        for name in ("mem", "kmsg", "tty", "fuse", "kvm", "vda", "net/tun", "shm", "mqueue"):
            if not isinstance(t(os.open, f"/dev/{name}", os.O_RDWR), str): print("escaped", name)
        t(fcntl.ioctl, 0, 0x5412, b"x")""",
    "reserves memory": """
        import mmap
        for flags in (mmap.MAP_PRIVATE, mmap.MAP_SHARED):
            for size in (3 << 29, 8 << 30):
                if not isinstance(t(mmap.mmap, -1, size, flags | mmap.MAP_ANONYMOUS), str):
                    print("escaped")""",
    "leaves processes that hold its pipes and fork on": """
        import os, time
        if not isinstance(t(os.fork), str):
            t(os.setsid); t(os.fork)
            ends = time.monotonic() + 1
            while time.monotonic() < ends and os.getppid() != 1: t(os.fork)
            time.sleep(0.2)""",
    "races renames against links": """
        import os, threading, time
        base, until = "/tmp/race", time.monotonic() + 0.3
        t(os.makedirs, base + "/d")
        def swap():
            while time.monotonic() < until:
                t(os.rename, base + "/d", base + "/e")
                t(os.symlink, FOLDER, base + "/d")
                t(os.unlink, base + "/d")
                t(os.rename, base + "/e", base + "/d")
        def use():
            while time.monotonic() < until:
                print(t(lambda: open(base + "/d/secret").read()))
                t(lambda: open(base + "/d/escaped", "w").write("escaped"))
                t(os.rename, base + "/d/secret", base + "/taken")
                t(os.rename, base + "/e", FOLDER + "/escaped")
        threads = [threading.Thread(target=each) for each in (swap, use)]
        for each in threads:
            t(each.start)
        for each in threads:
            t(each.join)""",
    "leaves a core file": """
        import os, resource
        t(resource.setrlimit, resource.RLIMIT_CORE, (-1, -1))
        t(lambda: open("/proc/self/coredump_filter", "w").write("0xff"))
        t(os.chdir, FOLDER)
        os.abort()""",
    "uses calls of other sizes": """
        import ctypes
        libc = ctypes.CDLL(None)
        t(libc.syscall, 0x40000000 + 39)""",
}
HELPERS = """
def t(function, *arguments):
    try:
        return function(*arguments)
    except BaseException as error:
        return type(error).__name__
"""


@pytest.mark.parametrize("name", ATTACKS)
async def test_nothing_outside_is_read_or_changed(
    name: str, sandbox: Sandbox, held: tuple[int, ProgramLimits], outside: Outside
) -> None:
    known = "".join(f"{key} = {value!r}\n" for key, value in outside.names().items())
    before = outside.state()
    outcome = await sandbox.run(
        HELPERS + known + textwrap.dedent(ATTACKS[name]),
        stdin=b"",
        limits=held[1],
    )
    written = outcome.stdout + outcome.stderr
    assert SECRET.encode() not in written
    assert b"escaped" not in outcome.stdout
    assert b"SyntaxError" not in written
    assert outside.state() == before
    assert not Path(f"/tmp/paceline-escaped-{os.getpid()}").exists()
    assert (await sandbox.run("print(1)", stdin=b"", limits=ProgramLimits())).stdout == b"1\n"


async def test_later_programs_find_nothing_of_earlier_ones(
    sandbox: Sandbox, held: tuple[int, ProgramLimits]
) -> None:
    """Each child reads its program itself, so no other one inherits it."""
    marker = f"{SECRET}-of-another-program"
    await sandbox.run(f"x = '{marker}'", stdin=marker.encode(), limits=held[1])
    found = await sandbox.run(
        textwrap.dedent("""
            import gc, sys
            half = "another-" + "program"
            texts = [x for x in gc.get_objects() if isinstance(x, (str, bytes, dict, list, tuple))]
            print(sum(half in str(x) for x in texts if x is not texts and len(str(x)) < 10_000))
        """),
        stdin=b"",
        limits=held[1],
    )
    assert int(found.stdout) <= 2, found  # its own text
