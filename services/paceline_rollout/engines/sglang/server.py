"""An SGLang server as a child: command line, start, death, end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from paceline.errors import ConfigError, DeadlineError, UnavailableError
from paceline.files import tail
from paceline.logs import Log
from paceline.ports import is_free
from paceline_rollout.engines.sglang.api import SglangClient
from paceline_rollout.engines.sglang.capabilities import Capabilities, parse_version
from paceline_rollout.engines.sglang.options import MODULE

GUARD = Path(__file__).with_name("guard.py")
POLL_S = 0.25
PORT_TRIES = 3
_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Room for the few tokens that SGLang keeps for itself beyond the longest context.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
}
_VERSION_SCRIPT = "from importlib.metadata import version; print(version('sglang'))"
_CPU_ARGS = (
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--disable-overlap-schedule",
    "--mem-fraction-static=0.2",
)
CONTEXT_SLACK = 8
_MOST_LOG_BYTES = 64 << 20
log = Log("sglang")


class Server(Protocol):
    """Where SGLang answers, whoever started it."""

    url: str
    api_key: str

    async def start(self) -> Capabilities:
        """Make it answer; raises `UnavailableError` if it does not."""
        ...

    async def died(self) -> str:
        """Wait until it is gone; why."""
        ...

    async def stop(self) -> None:
        """Let it go."""
        ...


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started."""

    python: Path
    model_dir: Path
    log_path: Path
    dtype: str
    device: str  # empty: whatever SGLang finds
    max_context: int
    max_concurrent: int
    max_tokens: int  # of its cache; 0: what fits
    threads: int
    tp: int = 1
    dp: int = 1
    ep: int = 1
    deterministic: bool = False
    module: str = MODULE
    args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    def command(
        self, *, port: int, capabilities: Capabilities | None, config: Path | None = None
    ) -> list[str]:
        """The command line, for a server of these capabilities as far as they are known.

        `config` is a file with further flags: everybody on a machine can read a command line.
        """
        flags = [
            f"--model-path={self.model_dir}",
            "--load-format=dummy",
            "--served-model-name=policy",
            f"--dtype={self.dtype}",
            f"--context-length={self.max_context + CONTEXT_SLACK}",
            f"--max-running-requests={self.max_concurrent}",
            f"--tp-size={self.tp}",
            f"--dp-size={self.dp}",
            "--host=127.0.0.1",
            f"--port={port}",
            "--sleep-on-idle",
            "--skip-tokenizer-init",
            # It asks for more tokens than a small context has room for.
            "--skip-server-warmup",
        ]
        if self.ep > 1:
            flags.append(f"--ep-size={self.ep}")
        if self.device:
            flags.append(f"--device={self.device}")
        if self.device == "cpu":
            flags.extend(_CPU_ARGS)
        if self.max_tokens:
            flags.append(f"--max-total-tokens={self.max_tokens}")
        if self.deterministic:
            flags.append("--enable-deterministic-inference")
        if capabilities is not None and capabilities.incremental:
            flags.append("--incremental-streaming-output")
        if config is not None:
            flags += ["--config", str(config)]
        return [str(self.python), "-m", self.module, *flags, *self.args]

    def variables(self) -> dict[str, str]:
        """The environment of the process."""
        threads = {"OMP_NUM_THREADS": str(self.threads)}
        return {**os.environ, **_ENVIRONMENT, **threads, **self.environment}


class LaunchedServer:
    """A server of our own, in a process group of its own, that dies with this process."""

    def __init__(
        self,
        launch: Launch,
        *,
        api_key: str,
        timeout_s: float,
        choose_port: Callable[[], int] | None = None,
    ) -> None:
        self.url = ""
        self.api_key = api_key
        self._launch = launch
        self._timeout_s = timeout_s
        self._choose_port = choose_port or free_port
        self._guard: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Of the guard, which is also the process group; 0 when none runs."""
        return self._guard.pid if self._guard is not None else 0

    async def start(self) -> Capabilities:
        """Start and wait until it is ready.

        Raises:
            ConfigError: there is no such interpreter.
            UnavailableError: it ended or was not ready in time; carries its last words.
        """
        await self.stop()
        known = await self._installed()
        for _ in range(PORT_TRIES - 1):
            port = self._choose_port()
            try:
                return await self._start_at(port, known)
            except UnavailableError:
                # Whoever else starts at this moment may have been given the same one.
                if is_free(port):
                    raise
                log.warning("the port was taken by another", port=port)
        return await self._start_at(self._choose_port(), known)

    async def _start_at(self, port: int, known: Capabilities | None) -> Capabilities:
        launch = self._launch
        self.url = f"http://127.0.0.1:{port}"
        config = self._write_key()
        self._guard = await self._spawn(
            launch.command(port=port, capabilities=known, config=config)
        )
        log.info("starting", pid=self._guard.pid, url=self.url, log=launch.log_path)
        began = time.monotonic()
        client = SglangClient(self.url, api_key=self.api_key)
        try:
            await self._until_ready(client)
            info = await client.server_info()
        except BaseException:
            await self.stop()
            raise
        finally:
            await client.close()
            if config is not None:
                config.unlink(missing_ok=True)
        found = str(info.get("version", ""))
        log.info("ready", version=found, took_s=time.monotonic() - began, url=self.url)
        return parse_version(found)

    def _write_key(self) -> Path | None:
        """A file with the key for the server to read at its start, for the owner alone."""
        if not self.api_key:
            return None
        path = self._launch.log_path.with_suffix(f".{os.getpid()}.yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.touch(mode=0o600, exist_ok=False)
        path.write_text(f"api-key: {json.dumps(self.api_key)}\n")
        return path

    async def died(self) -> str:
        """Wait until it is gone; why."""
        assert self._guard is not None
        code = await self._guard.wait()
        return f"the SGLang server ended with {code}; its log is {self._launch.log_path}"

    async def stop(self) -> None:
        """Kill the group; returns when the guard is gone."""
        guard, self._guard = self._guard, None
        if guard is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(guard.pid, signal.SIGKILL)
        await guard.wait()

    async def _until_ready(self, client: SglangClient) -> None:
        guard, launch = self._guard, self._launch
        assert guard is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                while not await client.ready():
                    if guard.returncode is not None:
                        words = tail(launch.log_path, num_bytes=2000)
                        raise UnavailableError(f"the SGLang server did not start: {words}")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            text = f"the SGLang server was not ready after {self._timeout_s:g} s; see its log"
            raise DeadlineError(f"{text} {launch.log_path}") from None

    async def _spawn(self, command: Sequence[str]) -> asyncio.subprocess.Process:
        launch = self._launch
        launch.log_path.parent.mkdir(parents=True, exist_ok=True)
        if launch.log_path.exists() and launch.log_path.stat().st_size > _MOST_LOG_BYTES:
            launch.log_path.replace(launch.log_path.with_suffix(".log.1"))
        with launch.log_path.open("ab") as out:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                str(GUARD),
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=out,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                env=launch.variables(),
            )

    async def _installed(self) -> Capabilities | None:
        """Of the release in the interpreter's environment; None if that does not say."""
        python = self._launch.python
        try:
            asking = await asyncio.create_subprocess_exec(
                str(python),
                "-I",
                "-c",
                _VERSION_SCRIPT,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
        except OSError as error:
            text = "allowed: the interpreter of an environment with SGLang (make sglang-env)"
            raise ConfigError(
                f"engines.sglang.python: {python}: {error.strerror}; {text}"
            ) from None
        found, _ = await asking.communicate()
        return parse_version(found.decode()) if asking.returncode == 0 else None


class AttachedServer:
    """A server that someone else runs; it counts as gone when it stops answering."""

    def __init__(self, url: str, *, api_key: str, timeout_s: float, probe_s: float = 1.0) -> None:
        self.url = url
        self.api_key = api_key
        self._timeout_s = timeout_s
        self._probe_s = probe_s

    async def start(self) -> Capabilities:
        """Wait until it answers.

        Raises:
            DeadlineError: it does not.
        """
        client = SglangClient(self.url, api_key=self.api_key)
        try:
            async with asyncio.timeout(self._timeout_s):
                while not await client.ready():
                    await asyncio.sleep(POLL_S)
            info = await client.server_info()
        except TimeoutError:
            raise DeadlineError(f"no SGLang server answers at {self.url}") from None
        finally:
            await client.close()
        return parse_version(str(info.get("version", "")))

    async def died(self) -> str:
        """Wait until two probes in a row fail."""
        client = SglangClient(self.url, api_key=self.api_key)
        missed = 0
        try:
            while missed < 2:
                await asyncio.sleep(self._probe_s)
                try:
                    await client.model_info()
                    missed = 0
                except (UnavailableError, DeadlineError):
                    missed += 1
        finally:
            await client.close()
        return f"the SGLang server at {self.url} does not answer"

    async def stop(self) -> None:
        """It is not ours to stop."""


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
