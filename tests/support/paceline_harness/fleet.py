"""Trainer, tracker and rollout workers as processes on the hosts of a test network.

The programs (`tracker.py`, `seed.py`, `worker.py`) come from a folder given by the caller, since
this library does not depend on services. They take commands as JSON lines on standard input and
reply with JSON lines on standard output. All use the same monotonic clock.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.errors import DeadlineError, StateError, UnavailableError
from paceline.platform.files import tail
from paceline_harness.network import Host, Network
from paceline_harness.patience import PATIENCE_S

JOB = "broadcast"
_START_S = PATIENCE_S
_REPLY_S = PATIENCE_S
_LOG_BYTES = 3000
_TRACKER_PORT = 7000
_VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Program:
    """A process that exchanges JSON lines with the test."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], *, host: Host, log: Path
    ) -> None:
        self.name = name
        self.host = host
        self._log = log
        self._process = process
        self._events: list[dict[str, Any]] = []
        self._ended = False
        self._news = threading.Condition()
        threading.Thread(target=self._read, name=name, daemon=True).start()

    def tell(self, do: str, **fields: Any) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
        self._process.stdin.flush()

    def ask(self, do: str, *, timeout_s: float = _REPLY_S, **fields: Any) -> dict[str, Any]:
        """Send a command and wait for its reply."""
        with self._news:
            seen = len(self._events)
        self.tell(do, **fields)
        return self.wait(do, timeout_s=timeout_s, after=seen)

    def wait(
        self, event: str, *, timeout_s: float, after: int = 0, **fields: Any
    ) -> dict[str, Any]:
        """Wait for the first event with this name and these fields.

        Raises:
            DeadlineError: it did not arrive in time.
            UnavailableError: the process ended without it.
        """
        deadline = time.monotonic() + timeout_s
        with self._news:
            while (found := self._find(event, after, fields)) is None:
                if self._ended:
                    words = tail(self._log, num_bytes=_LOG_BYTES)
                    raise UnavailableError(f"{self.name}: ended before {event!r}\n{words}")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineError(f"{self.name}: no {event!r} {fields} in {timeout_s} s")
                self._news.wait(left)
            return found

    def events(self, event: str) -> list[dict[str, Any]]:
        """All events with this name so far."""
        with self._news:
            return [each for each in self._events if each["event"] == event]

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def freeze(self) -> None:
        """Suspend the process (SIGSTOP); its connections stay open."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume the process."""
        os.kill(self._process.pid, signal.SIGCONT)

    def _find(self, event: str, after: int, fields: Mapping[str, Any]) -> dict[str, Any] | None:
        for each in self._events[after:]:
            if each["event"] == event and all(each.get(k) == v for k, v in fields.items()):
                return each
        return None

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                with self._news:
                    self._events.append(json.loads(line))
                    self._news.notify_all()
        except ValueError:  # closed with the network
            pass
        with self._news:
            self._ended = True
            self._news.notify_all()


class Fleet:
    """The programs on a network, as a context manager. The tracker runs on the first host.

    `logs`: a folder for the programs' standard error.
    """

    def __init__(self, *, network: Network, programs: Path, logs: Path) -> None:
        self.network = network
        self.workers: dict[str, Program] = {}
        self.seeds: list[Program] = []
        self._programs = programs
        self._logs = logs
        host = network.hosts[0]
        self._tracker = f"{host.address}:{_TRACKER_PORT}"
        self.tracker = self._start("tracker", host, {"address": self._tracker})

    def add_seeds(self, hosts: Iterable[Host]) -> None:
        """Start a trainer with one seed per host; together they hold a complete snapshot."""
        chosen = list(hosts)
        options = {"tracker": self._tracker, "parts": len(chosen), "job-id": JOB}
        for part, host in enumerate(chosen):
            name = f"seed-{part}"
            mine = {"address": host.address, "part": part, "site": f"site-{host.site}"}
            self.seeds.append(self._start("seed", host, {**options, **mine}, name=name))

    def add_workers(self, hosts: Iterable[Host], **options: Any) -> list[Program]:
        """Start a worker on each host, which follows its route."""
        added: list[Program] = []
        for host in hosts:
            name = f"worker-{host.index}"
            given = {
                "tracker": self._tracker,
                "job-id": JOB,
                "address": host.address,
                "worker-id": name,
                "site": f"site-{host.site}",
                **options,
            }
            self.workers[name] = self._start("worker", host, given, name=name)
            added.append(self.workers[name])
        return added

    def settle(self, *, timeout_s: float = _START_S) -> None:
        """Wait until all programs are running and known to the tracker."""
        deadline = time.monotonic() + timeout_s
        for program in [self.tracker, *self.seeds, *self.workers.values()]:
            program.wait("ready", timeout_s=max(deadline - time.monotonic(), 0.001))
        self.until(
            lambda: self.members().keys() >= self.workers.keys(),
            "all are members",
            timeout_s=max(deadline - time.monotonic(), 0.001),
        )

    def members(self) -> dict[str, int]:
        """The members known to the tracker, each with the last version it reported."""
        return self.tracker.ask("members")["members"]

    def publish(self, num_bytes: int, *, held_at: float = 1.0, **fields: Any) -> dict[str, Any]:
        """Publish a new version; returns its number and the time just before it was announced.

        `seed`: seed of its random bytes. `change`: derive it instead from the previous version by
        one optimiser step with this learning rate. `held_at`: the share of the bytes available
        before `release` is called.
        """
        for seed in self.seeds:
            seed.ask("prepare", num_bytes=num_bytes, **fields)
        first, *others = self.seeds
        announced = first.ask("publish", held_at=held_at)
        for seed in others:
            seed.ask("publish", held_at=held_at)
        return announced

    def release(self) -> None:
        """Let the seeds produce the bytes that were held back."""
        for seed in self.seeds:
            seed.ask("release")

    def arrivals(
        self, version: int, *, timeout_s: float, workers: Iterable[Program] | None = None
    ) -> dict[str, float]:
        """The time at which each worker had this version complete and verified."""
        deadline = time.monotonic() + timeout_s
        found: dict[str, float] = {}
        for worker in self.workers.values() if workers is None else workers:
            left = max(deadline - time.monotonic(), 0.001)
            event = worker.wait("complete", timeout_s=left, version=version)
            found[worker.name] = event["at_s"]
        return found

    def digests_agree(self, version: int, workers: Iterable[Program] | None = None) -> bool:
        """Whether all workers hold exactly the bytes of this version, the last one published."""
        expected = self.seeds[0].ask("digest")["digest"]
        asked = self.workers.values() if workers is None else workers
        return all(w.ask("digest", version=version)["digest"] == expected for w in asked)

    def ready_share(self, worker: Program, version: int) -> float:
        """The share of a version that a worker has, 0 to 1."""
        for each in worker.ask("progress")["transfers"]:
            if each["version"] == version and each["num_chunks"]:
                return float(each["num_ready"] / each["num_chunks"])
        return 0.0

    def sources(self, worker: Program, version: int) -> list[str]:
        """Names of the workers from which a worker currently pulls a version."""
        by_address = {each.host.address: name for name, each in self.workers.items()}
        transfers = worker.ask("progress")["transfers"]
        endpoints = [e for t in transfers if t["version"] == version for e in t["sources"]]
        addresses = [endpoint.rpartition("/")[2].rpartition(":")[0] for endpoint in endpoints]
        return [by_address[address] for address in addresses if address in by_address]

    def relay(self, version: int) -> Program:
        """A worker that relays: it pulls from a worker, and others pull from it.

        Raises:
            StateError: there is currently none.
        """
        above = {name: self.sources(worker, version) for name, worker in self.workers.items()}
        asked = {name for names in above.values() for name in names}
        depths = {name: _depth(name, above) for name in asked if above.get(name)}
        if not depths:
            raise StateError(f"nobody relays version {version}: {above}")
        ordered = sorted(depths, key=lambda name: depths[name])
        return self.workers[ordered[len(ordered) // 2]]

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of all programs that transfer weights, since their start."""
        programs = [*self.seeds, *self.workers.values()]
        return {each.name: each.ask("usage")["cpu_s"] for each in programs}

    def until(self, condition: Callable[[], bool], what: str, *, timeout_s: float) -> None:
        """Wait for a condition. Raises `DeadlineError`."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise DeadlineError(f"{what}: not in {timeout_s} s")
            time.sleep(0.02)

    def close(self) -> None:
        """Kill all programs."""
        for program in [self.tracker, *self.seeds, *self.workers.values()]:
            program.kill()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(
        self, program: str, host: Host, options: Mapping[str, Any], *, name: str = ""
    ) -> Program:
        path = self._programs / f"{program}.py"
        given = [f"--{key}={value}" for key, value in options.items()]
        path_of_log = self._logs / f"{name or program}.log"
        with path_of_log.open("ab") as log:
            process = host.start(
                [sys.executable, str(path), *given],
                environment=_VARIABLES,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        return Program(name or program, process, host=host, log=path_of_log)


def _depth(name: str, above: Mapping[str, Sequence[str]], so_far: int = 0) -> int:
    """Number of workers between this one and the trainer."""
    names = above.get(name)
    if not names or so_far > len(above):
        return so_far
    return _depth(names[0], above, so_far + 1)
