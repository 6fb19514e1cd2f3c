"""Named processes on this machine: process groups, identity on disk, reliable termination.

Running processes are recorded in files, so that the successor of a dead supervisor adopts them.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

import psutil

from paceline.errors import UnavailableError
from paceline.front.local import fork_server
from paceline.front.local.fork_server import ForkedProcess, ForkServer
from paceline.platform.files import discard, read_json, tail, write_json
from paceline.platform.proxies import without_loopback
from paceline.platform.server.failures import KILLED, OOM, marked, num_oom_kills
from paceline.platform.telemetry.logs import Log
from paceline.platform.telemetry.monitoring import Targets

log = Log("processes")

ENVIRONMENT = {
    # Python imports nothing from the working directory, also in processes started by torchrun.
    "PYTHONSAFEPATH": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Threads without work sleep: processes that compute share the cores.
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
}
_CLOCK_SLACK_S = 2.0
_MOST_OUT_BYTES = 1 << 20
_LAUNCHER_LINE = re.compile(r"^[EWI]\d{4} .*torch/distributed/")
_SIGNAL = re.compile(r"Signal (\d+) \(SIG\w+\) received by PID")
_ERROR_LINE = re.compile(r"^(\[rank\d+\]: ?)?([A-Za-z_][\w.]*(Error|Exception|Exit)): ")


@dataclass(frozen=True, slots=True)
class Record:
    """A started process, identified by pid and creation time."""

    name: str
    pid: int  # 0: about to be started, known only by its mark
    created: float
    mark: str  # an argument unique to this process on this machine
    owner: str  # kind of its supervisor
    labels: dict[str, str] = field(default_factory=dict[str, str])


class Processes:
    """Starts, finds and stops the named processes of one supervisor.

    Several supervisors may share the folder of state files; names are unique in it.
    """

    def __init__(
        self,
        *,
        folder: Path,
        logs: Path,
        owner: str = "",
        targets: Targets | None = None,
        preloaded: Sequence[str] = (),
    ) -> None:
        """`preloaded`: modules that a fork server imports for the processes that ask for it."""
        self._folder = folder
        self._owner = owner
        self._logs = logs
        self._targets = targets
        self._children: dict[str, subprocess.Popen[bytes] | ForkedProcess] = {}
        self._oom_kills: dict[str, int] = {}  # this machine's count when each was started
        folder.mkdir(parents=True, exist_ok=True)
        logs.mkdir(parents=True, exist_ok=True)
        self._preloaded = preloaded
        self._fork_server: ForkServer | None = None
        self.preload()
        records = (record for record in records_in(folder) if record.owner == owner)
        self._records = {record.name: record for record in records}

    def preload(self) -> None:
        """Start or join a fork server, if there is something to import and it is of use here."""
        if not self._preloaded or not fork_server.is_useful() or self._join():
            return
        self._fork_server = ForkServer.launch(
            self._preloaded,
            path=str(self._folder.absolute() / fork_server.NAME),
            output=self._logs / "fork-server.out",
            environment=environment_of({}),
        )

    def _join(self) -> bool:
        """Use the shared fork server from now on; returns whether there is one."""
        path = os.environ.get(fork_server.SHARED)
        if not path or not fork_server.is_useful():
            return False
        with contextlib.suppress(UnavailableError):
            self._fork_server = ForkServer.connect(path)
            return True
        return False

    def close(self) -> None:
        """End the fork server; the processes go on."""
        if self._fork_server is not None:
            self._fork_server.close()

    def records(self) -> list[Record]:
        """All processes with a state file, dead or alive."""
        return list(self._records.values())

    def find(self, name: str) -> Record | None:
        """The process started under this name."""
        return self._records.get(name)

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        mark: str,
        labels: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        forked: bool = False,
    ) -> Record:
        """Start a process in its own session; leftovers of an earlier one are killed first.

        Its umask makes the files it creates readable by the owner only. `forked`: from the fork
        server, if there is one; the command is `[python, "-P", "-m", module, *arguments]`.
        """
        self.kill(name, mark=mark)
        self._oom_kills[name] = num_oom_kills()
        # Saved before the start, so that a supervisor killed now leaves no unknown process.
        self._write(Record(name, 0, 0.0, mark, self._owner, dict(labels or {})))
        with self._open_out(name) as out:
            child = self._forked(name, command, mark, out, environment or {}) if forked else None
            child = child or subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=0o077,
                env=environment_of(environment or {}),
            )
        record = Record(name, child.pid, _created(child.pid), mark, self._owner, dict(labels or {}))
        self._children[name] = child
        self._records[name] = record
        self._write(record)
        self._tell(record)
        log.info("started", process=name, pid=child.pid)
        return record

    def alive(self, name: str) -> bool:
        """Whether the process of this name is running."""
        if (child := self._children.get(name)) is not None:
            return child.poll() is None
        record = self._records.get(name)
        return record is not None and _is_running(record)

    def exit_code(self, name: str) -> int | None:
        """The exit code; None while it runs, or if an earlier supervisor started it."""
        child = self._children.get(name)
        return None if child is None else child.poll()

    def stop(self, name: str, *, grace_s: float) -> None:
        """Send SIGTERM, then after `grace_s` SIGKILL, to the process and its descendants."""
        record = self._records.get(name)
        if record is None:
            return
        below: list[psutil.Process] = []
        if self.alive(name):
            below = _descendants(record.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGTERM)
            if not self._wait(name, timeout_s=grace_s):
                log.warning("killed after the grace period", process=name, grace_s=grace_s)
        self.kill(name)
        for process in below:
            with contextlib.suppress(psutil.Error):
                process.kill()
        log.info("stopped", process=name, pid=record.pid, code=self.exit_code(name))

    def kill(self, name: str, *, mark: str = "", timeout_s: float = 5.0) -> None:
        """Send SIGKILL to the process, its group, their descendants, and all with its mark.

        Returns once they are gone and the exit code is known.
        """
        record, child = self._records.get(name), self._children.get(name)
        marks = {mark, record.mark if record else ""} - {""}
        deadline = time.monotonic() + timeout_s
        while (left := _family(record, marks)) or (child is not None and child.poll() is None):
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            if time.monotonic() > deadline:
                log.error("cannot kill", process=name, pids=[p.pid for p in left])
                return
            time.sleep(0.01)

    def forget(self, name: str) -> None:
        """Remove the state file of a process that has ended."""
        self._records.pop(name, None)
        self._children.pop(name, None)
        if self._targets is not None:
            self._targets.forget(name)
        discard(self._folder / f"{name}.json")

    def last_words(self, name: str, *, lines: int = 20) -> str:
        """The end of a process's output and log, its error first."""
        out = self._logs / f"{name}.out"
        paths = [out, self._logs / f"{name}.log", *self._logs.glob(f"{name}-rank*.log")]
        outputs = [path for path in paths if path.exists() and path.stat().st_size]
        outputs.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        texts = {path: tail(path, num_bytes=32_768) for path in outputs}
        heads = [self._end_of(name, texts.get(out, ""))]
        rows = [without_launcher(text) for text in texts.values()]
        heads += [marked(error) for text in rows if (error := last_error(text))][:1]
        newest = next((text for text in rows if text.strip()), "")
        ends = [row for row in summarise(newest, lines=lines).splitlines() if row not in heads]
        return "\n".join([head for head in heads if head] + ends)

    def _end_of(self, name: str, out: str) -> str:
        """The signal that ended it or, according to torchrun, one of its ranks; empty if none."""
        code = self.exit_code(name)
        reported = _SIGNAL.findall(out)
        number = -code if code is not None and code < 0 else int(reported[-1]) if reported else 0
        if number != signal.SIGKILL:
            return f"ended by signal {number}" if number else ""
        if num_oom_kills() > self._oom_kills.get(name, sys.maxsize):
            return f"{OOM}: {KILLED}: the kernel's OOM killer was active meanwhile"
        return KILLED

    def _forked(
        self,
        name: str,
        command: Sequence[str],
        mark: str,
        out: IO[bytes],
        environment: Mapping[str, str],
    ) -> ForkedProcess | None:
        """None without a fork server; one that had worked is started again for the next process."""
        if self._fork_server is None and not self._join():
            return None
        assert self._fork_server is not None
        try:
            return self._fork_server.start(
                command, output=out, environment=environment_of(environment)
            )
        except UnavailableError as error:
            log.warning("started without the fork server", error=error)
            self.kill(name, mark=mark)  # a fork of which the server could not tell any more
            if self._fork_server.lost and self._fork_server.ready:
                self.preload()
            return None

    def _write(self, record: Record) -> None:
        write_json(self._folder / f"{record.name}.json", asdict(record))

    def _tell(self, record: Record) -> None:
        address = record.labels.get("metrics")
        if self._targets is not None and address:
            shown = {key: record.labels.get(key, "") for key in ("service", "job")}
            self._targets.tell(record.name, address=address, labels=shown)

    def _wait(self, name: str, *, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self.alive(name):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        return True

    def _open_out(self, name: str) -> IO[bytes]:
        path = self._logs / f"{name}.out"
        if path.exists() and path.stat().st_size > _MOST_OUT_BYTES:
            path.replace(path.with_suffix(".out.1"))
        return path.open("ab")


def records_in(folder: Path) -> Iterator[Record]:
    """The processes of all supervisors with a state file in this folder, dead or alive, by name."""
    for path in sorted(folder.glob("*.json")):
        content = read_json(path)
        if content is not None:
            yield Record(**content)


def summarise(text: str, *, lines: int) -> str:
    """The last error line of an output, then its last lines without repetitions."""
    rows = list(dict.fromkeys(row.rstrip() for row in text.splitlines() if row.strip()))
    error = last_error(text)
    return "\n".join([*([error] if error else []), *rows[-lines:]])


def last_error(text: str) -> str:
    """The last error line of an output; empty if there is none."""
    rows = (row.rstrip() for row in text.splitlines())
    errors = [row for row in rows if _ERROR_LINE.match(row) and "ChildFailedError" not in row]
    return errors[-1] if errors else ""


def without_launcher(text: str) -> str:
    """An output without torchrun's report of a failed rank, which logs its own error."""
    rows = [row for row in text.splitlines() if not _LAUNCHER_LINE.match(row)]
    for place in reversed(range(len(rows))):
        if rows[place].startswith("Traceback"):
            ours = any("ChildFailedError" in row for row in rows[place:])
            return "\n".join(rows[:place] if ours else rows)
    return "\n".join(rows)


def _created(pid: int) -> float:
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return time.time()


def _is_running(record: Record) -> bool:
    if record.pid <= 0:
        return False
    try:
        process = psutil.Process(record.pid)
        same = abs(process.create_time() - record.created) < _CLOCK_SLACK_S
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def environment_of(added: Mapping[str, str]) -> dict[str, str]:
    """All variables of a process that is started here."""
    variables = {**os.environ, **ENVIRONMENT, **added}
    return {**variables, **without_loopback(variables)}


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _family(record: Record | None, marks: set[str]) -> list[psutil.Process]:
    """Running processes of a record; trainer ranks have their own sessions, hence the marks."""
    group = -1
    known = record is not None and record.pid > 0
    if record and known and (not psutil.pid_exists(record.pid) or _same_or_zombie(record)):
        group = record.pid
    family: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            belongs = os.getpgid(process.pid) == group or _carries(process, marks)
            if belongs and process.status() != psutil.STATUS_ZOMBIE:
                below = process.children(recursive=True)
                family.update({p.pid: p for p in [process, *below]})
    family.pop(os.getpid(), None)
    return list(family.values())


def _carries(process: psutil.Process, marks: set[str]) -> bool:
    """Whether a process has a mark; excludes, say, an editor that has the marked file open."""
    command = process.cmdline()
    return not marks.isdisjoint(command) and "python" in Path(command[0]).name


def _same_or_zombie(record: Record) -> bool:
    try:
        created = psutil.Process(record.pid).create_time()
    except psutil.NoSuchProcess:
        return True
    return abs(created - record.created) < _CLOCK_SLACK_S
