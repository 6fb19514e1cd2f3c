"""One run of a container, started through the shim."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kubernetes_double.errors import UnavailableError
from kubernetes_double.patience import PATIENCE_S

_SHIM = Path(__file__).with_name("shim.py")
_START_TIMEOUT_S = PATIENCE_S
KILLED = 128 + signal.SIGKILL


@dataclass(frozen=True, slots=True)
class Bind:
    """A file or folder of the machine, and its path in the container."""

    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The input of the shim. Paths on the machine must not contain symbolic links."""

    network: str
    hostname: str
    scratch: str
    binds: tuple[Bind, ...]
    links: Mapping[str, str]
    read_only_root: bool
    no_new_privileges: bool
    uid: int
    gid: int
    groups: tuple[int, ...]
    directory: str
    command: tuple[str, ...]
    environment: Mapping[str, str]


class Container:
    """A running container. `pid` is its main process in this PID namespace."""

    def __init__(self, spec: Spec, *, pid: int, shim: asyncio.subprocess.Process) -> None:
        self.pid = pid
        self._spec = spec
        self._shim = shim

    @property
    def alive(self) -> bool:
        """Whether it is running."""
        return self._shim.returncode is None

    async def wait(self) -> int:
        """Wait for its exit code; 128 + n after signal n."""
        return await self._shim.wait()

    def signal(self, number: int) -> None:
        """Send a signal to its main process; SIGKILL ends all of its processes."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def execute(self, command: Sequence[str], *, timeout_s: float) -> tuple[int, str]:
        """Run a command in it; returns exit code and output, code 124 after `timeout_s`."""
        enter = ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", "-r"]
        enter += [f"--wdns={self._spec.directory}"]
        groups = ",".join(map(str, self._spec.groups))
        drop = [f"--reuid={self._spec.uid}", f"--regid={self._spec.gid}"]
        drop += [f"--groups={groups}" if groups else "--clear-groups"]
        process = await asyncio.create_subprocess_exec(
            *(*enter, "setpriv", *drop, *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(self._spec.environment),
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout_s):
                output, _ = await process.communicate()
            return process.returncode or 0, output.decode(errors="replace")
        except TimeoutError:
            return 124, f"{command[0]}: no end after {timeout_s} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


async def start(spec: Spec, *, folder: Path, log: Path) -> Container:
    """Start a container; returns once its command has been executed. Output is appended to `log`.

    Raises:
        UnavailableError: a mount or the command failed; the text says which.
    """
    path = folder / "spec.json"
    path.write_text(json.dumps(asdict(spec)))
    path.chmod(0o600)
    reading, writing = os.pipe()
    try:
        with log.open("ab") as out:
            shim = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_SHIM), str(path), str(writing)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=(writing,),
                start_new_session=True,
            )
    finally:
        os.close(writing)
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            report = await _read_all(reading)
    except (TimeoutError, asyncio.CancelledError) as error:
        # Kill the container too: nothing else knows of it yet.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shim.pid, signal.SIGKILL)
        if isinstance(error, TimeoutError):
            raise UnavailableError(f"no start within {_START_TIMEOUT_S} s") from None
        raise
    pid, _, reason = report.partition("\n")
    if not pid or reason:
        await shim.wait()
        raise UnavailableError(reason or f"see the end of {log.name}")
    return Container(spec, pid=int(pid), shim=shim)


async def _read_all(descriptor: int) -> str:
    """Read until the other end is closed: by a successful exec, or by an earlier exit."""
    reader = asyncio.StreamReader()
    pipe = os.fdopen(descriptor, "rb")
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        return (await reader.read()).decode(errors="replace")
    finally:
        transport.close()
