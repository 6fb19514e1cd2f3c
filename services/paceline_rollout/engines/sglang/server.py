"""Launches an SGLang server as a child process, or attaches to a running one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from paceline.errors import ConfigError, DeadlineError, UnavailableError
from paceline.front.local.ports import are_free, free_port
from paceline.platform.files import tail
from paceline.platform.proxies import without_loopback
from paceline.platform.telemetry.logs import Log
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
    # SGLang reserves a few tokens beyond the longest context.
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
_MAX_LOG_BYTES = 64 << 20
log = Log("sglang")


class Server(Protocol):
    """An SGLang server, launched or attached to."""

    url: str
    api_key: str
    has_dummies: bool  # starts with dummy weights

    async def start(self) -> Capabilities:
        """Start the server and wait until it is ready, or raise `UnavailableError`."""
        ...

    async def died(self) -> str:
        """Wait until the server ends; returns why."""
        ...

    async def stop(self) -> None:
        """Stop the server, if it was launched."""
        ...


@dataclass(frozen=True, slots=True)
class Launch:
    """How to launch a server."""

    python: Path
    model_dir: Path
    log_path: Path
    dtype: str
    device: str  # empty: SGLang chooses
    max_context: int
    max_concurrent: int
    max_tokens: int  # of the KV cache; 0: as many as fit
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
        """The command line, for a server of these capabilities if they are known.

        `config` is a file with secret flags: all users of a machine can read a command line.
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
            # The warm-up request does not fit a small context.
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
        all_of_them = {**os.environ, **_ENVIRONMENT, **threads, **self.environment}
        return {**all_of_them, **without_loopback(all_of_them)}


class LaunchedServer:
    """A child server in its own process group, which ends with this process."""

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
        self.has_dummies = True
        self._launch = launch
        self._timeout_s = timeout_s
        self._derived = derived_ports(launch.dp)
        self._choose_port = choose_port or partial(
            free_port, random.Random(), derived=self._derived
        )
        self._guard: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Id of the guard's process and process group; 0 while none runs."""
        return self._guard.pid if self._guard is not None else 0

    async def start(self) -> Capabilities:
        """Start the server and wait until it is ready.

        Raises:
            ConfigError: the interpreter does not exist.
            UnavailableError: the server ended; has the last lines of its log.
            DeadlineError: the server was not ready in time.
        """
        await self.stop()
        capabilities = await self._installed()
        for _ in range(PORT_TRIES - 1):
            port = self._choose_port()
            try:
                return await self._start_at(port, capabilities)
            except UnavailableError:
                # A process that starts at the same time may have got the same port.
                if are_free(port, self._derived):
                    raise
                log.warning("port, or one derived from it, taken by another process", port=port)
        return await self._start_at(self._choose_port(), capabilities)

    async def _start_at(self, port: int, capabilities: Capabilities | None) -> Capabilities:
        launch = self._launch
        self.url = f"http://127.0.0.1:{port}"
        config = self._write_key()
        self._guard = await self._spawn(
            launch.command(port=port, capabilities=capabilities, config=config)
        )
        log.info("starting", pid=self._guard.pid, url=self.url, log=launch.log_path)
        started = time.monotonic()
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
        log.info("ready", version=found, took_s=time.monotonic() - started, url=self.url)
        return parse_version(found)

    def _write_key(self) -> Path | None:
        """A file with the API key, readable only by its owner, for the server to read at start."""
        if not self.api_key:
            return None
        path = self._launch.log_path.with_suffix(f".{os.getpid()}.yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.touch(mode=0o600, exist_ok=False)
        path.write_text(f"api-key: {json.dumps(self.api_key)}\n")
        return path

    async def died(self) -> str:
        """Wait until the server ends; returns why."""
        assert self._guard is not None
        code = await self._guard.wait()
        return f"the SGLang server ended with {code}; its log is {self._launch.log_path}"

    async def stop(self) -> None:
        """Kill the process group; returns when the guard has ended."""
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
                        log_tail = tail(launch.log_path, num_bytes=2000)
                        raise UnavailableError(f"the SGLang server did not start: {log_tail}")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            text = f"the SGLang server was not ready after {self._timeout_s:g} s; see its log"
            raise DeadlineError(f"{text} {launch.log_path}") from None

    async def _spawn(self, command: Sequence[str]) -> asyncio.subprocess.Process:
        launch = self._launch
        launch.log_path.parent.mkdir(parents=True, exist_ok=True)
        if launch.log_path.exists() and launch.log_path.stat().st_size > _MAX_LOG_BYTES:
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
        """Capabilities of the installed release; None if it cannot be determined."""
        python = self._launch.python
        try:
            process = await asyncio.create_subprocess_exec(
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
        found, _ = await process.communicate()
        return parse_version(found.decode()) if process.returncode == 0 else None


class AttachedServer:
    """A server that Paceline does not manage; it counts as ended once it stops answering."""

    def __init__(self, url: str, *, api_key: str, timeout_s: float, probe_s: float = 1.0) -> None:
        self.url = url
        self.api_key = api_key
        self.has_dummies = False  # perhaps, but another worker may have loaded weights before
        self._timeout_s = timeout_s
        self._probe_s = probe_s

    async def start(self) -> Capabilities:
        """Wait until the server is ready.

        Raises:
            DeadlineError: it was not ready in time.
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
        failures = 0
        try:
            while failures < 2:
                await asyncio.sleep(self._probe_s)
                try:
                    await client.model_info()
                    failures = 0
                except (UnavailableError, DeadlineError):
                    failures += 1
        finally:
            await client.close()
        return f"the SGLang server at {self.url} does not answer"

    async def stop(self) -> None:
        """Nothing: the server is not managed by Paceline."""


def derived_ports(dp: int) -> tuple[int, ...]:
    """What a server adds to its HTTP port for others that it binds, now or in some release.

    They are those of the sidecar of gRPC, of the exchange among nodes, of data parallel attention
    with one for each of `dp` ranks, and of gRPC.
    """
    return (1, 13, *range(233, 240 + dp), 10_000)
