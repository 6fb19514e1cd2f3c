"""Has a model of which only `config.json` is known computed, before its job is accepted."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO
from weakref import WeakValueDictionary

from paceline.errors import ConfigError, UnavailableError
from paceline.front.local import fork_server
from paceline.front.local.fork_server import ForkedProcess, ForkServer
from paceline.front.local.processes import environment_of
from paceline.models.model_probe import MODULES, WRONG
from paceline.platform.fair_queue import FairThreads, QueueOwner
from paceline.platform.telemetry.logs import Log

_TIMEOUT_S = 60.0  # torch is imported where no fork server has
_MOST_AT_ONCE = 3
_MOST_OF_TENANT = 2  # a trainer and an engine; another tenant need not wait for them
_MOST_KNOWN = 1024
_KEPT_BYTES = 1 << 16
log = Log("probe")


class ModelProbe:
    """Asks processes of trainer and engine, which seal themselves before they read the model."""

    def __init__(self, run_dir: Path) -> None:
        """`run_dir`: that of the controller whose fork server has imported what they need."""
        shared = os.environ.get(fork_server.SHARED)
        self._forks = shared or str(run_dir / "processes" / fork_server.NAME)
        self._threads = FairThreads(_MOST_AT_ONCE, "probe", most_of_tenant=_MOST_OF_TENANT)
        self._known: OrderedDict[tuple[str, str], str] = OrderedDict()  # why it is refused
        # Jobs of a tenant that come together with the same model, such as a sweep, ask once.
        self._turns = WeakValueDictionary[tuple[str, str, str], asyncio.Lock]()

    @property
    def is_possible(self) -> bool:
        """Whether torch is installed here."""
        return all(find_spec(name) is not None for name in ("torch", "transformers"))

    async def check(self, config: bytes, engine: str, tenant: str) -> None:
        """Check what `config.json` describes, for the trainer and the engine of this kind.

        What cannot be tried here is left to their own starts.

        Raises:
            ConfigError: the model cannot be computed; says why.
        """
        if not self.is_possible:
            return
        kinds = [kind for kind in ("trainer", engine) if kind in MODULES]
        owner = QueueOwner(tenant)
        answers = await asyncio.gather(
            *(self._problem(MODULES[kind], config, owner) for kind in kinds)
        )
        if problems := list(filter(None, answers)):
            raise ConfigError(f"model.path: {'; '.join(problems)}")

    async def _problem(self, module: str, config: bytes, owner: QueueOwner) -> str:
        name = module, hashlib.sha256(config).hexdigest()
        async with self._turns.setdefault((owner.tenant, *name), asyncio.Lock()):
            if name not in self._known:
                said = await self._threads.run(owner, partial(self._ask, module, config))
                try:
                    why = str(json.loads(said)[WRONG])
                except (ValueError, KeyError, TypeError):
                    log.warning("a model could not be tried", module=module, said=said)
                    return ""
                self._known[name] = why
                if len(self._known) > _MOST_KNOWN:
                    self._known.popitem(last=False)
            return self._known[name]

    def _ask(self, module: str, config: bytes) -> str:
        """The last line that the process has printed."""
        with tempfile.TemporaryDirectory(prefix="paceline-model-") as folder:
            Path(folder, "config.json").write_bytes(config)
            reader, writer = os.pipe()
            with open(reader, "rb") as said, ExitStack() as held:
                with open(writer, "wb") as output:
                    command = [sys.executable, "-P", "-m", module, folder]
                    held.callback(_end, self._start(command, output, held))
                text = _read(said, time.monotonic() + _TIMEOUT_S)
        lines = text.decode(errors="replace").rstrip().splitlines()
        return lines[-1] if lines else ""

    def _start(
        self, command: Sequence[str], output: IO[bytes], held: ExitStack
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        environment = environment_of({})
        with suppress(UnavailableError):
            server = ForkServer.connect(self._forks)
            held.callback(server.close)
            return server.start(command, output=output, environment=environment)
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )


def _read(said: IO[bytes], deadline_s: float) -> bytes:
    """The end of what a process prints until it ends, or until then."""
    kept = b""
    poll = select.poll()
    poll.register(said, select.POLLIN)
    while (left_s := deadline_s - time.monotonic()) > 0:
        if not poll.poll(1000 * left_s) or not (data := os.read(said.fileno(), _KEPT_BYTES)):
            break
        kept = (kept + data)[-_KEPT_BYTES:]
    return kept


def _end(process: subprocess.Popen[bytes] | ForkedProcess) -> None:
    process.kill()
    if isinstance(process, subprocess.Popen):
        process.wait()
