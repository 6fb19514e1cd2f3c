"""Runs everything as processes of this machine."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.config.sections.endpoints import EndpointSettings
from paceline.config.service import (
    HeartbeatSettings,
    LogSettings,
    PoolOptions,
    ServiceSettings,
)
from paceline.enums import WorkerKind
from paceline.errors import InvalidError, PacelineError
from paceline.front.local.devices.device import VISIBLE
from paceline.front.local.ports import PortSlots
from paceline.front.local.processes import Processes, Record
from paceline.platform.files import discard, discard_drafts, write_secret
from paceline.platform.server.settings_file import write_settings
from paceline.platform.telemetry.monitoring import targets_of
from paceline.platform.transport.rpc import call, connect_as
from paceline.platform.transport.service_keys import read_keys
from paceline_controller.jobs.observed import Observed
from paceline_controller.jobs.placements import Placements
from paceline_controller.jobs.plan import Wanted, replicas_of
from paceline_controller.runtimes.base import ONLY_RANK, CredentialIssuer

HEALTH_TIMEOUT_S = 1.0
PROBE_TIMEOUT_S = 1.0
STALE_S = 60.0
LOAD_TIMEOUT_S = 3600.0
_ASK_OUTSIDE = (WorkerKind.REWARD, WorkerKind.ENVIRONMENT)
_DEVICES = "devices"
_HAVE_WEIGHTS = {WorkerKind.ROLLOUT, WorkerKind.TRAINER}
Command = Callable[[Wanted, Path], Sequence[str]]


class ProcessRuntime:
    """A `Runtime` of local processes; `settings` are those of the controller itself."""

    def __init__(
        self,
        settings: ServiceSettings,
        *,
        credentials: CredentialIssuer,
        ports: PortSlots,
        beat: Path,
        child_grace_s: float,
        stale_s: float = STALE_S,
        load_timeout_s: float = LOAD_TIMEOUT_S,
        weights_mbit_per_s: float | None = None,
        weights_transport: str = "http",
        pools: Mapping[str, PoolOptions] | None = None,
        worlds: Mapping[str, Mapping[str, Any]] | None = None,
        endpoints: Mapping[str, EndpointSettings] | None = None,
        placements: Placements | None = None,
        command: Command | None = None,
        preloaded: Sequence[str] = (),
    ) -> None:
        """`preloaded`: modules that trainers and rollout workers find imported.

        `placements`: who gets which GPUs.

        `load_timeout_s`: for so long a process that answers its liveness probe may get ready.
        """
        self._settings = settings
        self._credentials = credentials
        self._weights_mbit_per_s = weights_mbit_per_s
        self._weights_transport = weights_transport
        self._pools = pools or {}
        self._worlds = worlds or {}
        self._endpoints = endpoints or {}
        self._keys = None if settings.service_keys is None else read_keys(settings.service_keys)
        self._run_dir = settings.run_dir.resolve()
        self._ports = ports
        self._beat = beat.resolve()
        self._child_grace_s = child_grace_s
        self._stale_s = stale_s
        self._load_timeout_s = load_timeout_s
        self._ready = set[str]()  # processes that have been
        self._placements = placements or Placements()
        self._command = command or self.command_of
        self._processes = Processes(
            folder=self._run_dir / "processes",
            logs=self._run_dir / "logs",
            owner=str(settings.kind),
            targets=targets_of(self._run_dir),
            preloaded=preloaded,
        )
        self._discard_strays()

    def units(self, wanted: Iterable[Wanted]) -> list[Wanted]:
        """Every replica is a process with a name of its own, if there are GPUs for it."""
        return self._placements.placed(replicas_of(wanted))

    async def scale(self, name: str, replicas: int) -> None:
        """A process is always one."""
        raise InvalidError(f"{name}: one process cannot be {replicas}")

    async def list(self) -> list[Observed]:
        """Everything that was started and not stopped since."""
        records = self._processes.records()
        loads = await asyncio.gather(*map(self._loads, records))
        return [self._observe(*pair) for pair in zip(records, loads, strict=True)]

    async def start(self, wanted: Wanted, *, incarnation: int) -> None:
        """Write its settings and, for a worker of a job, its credential, and start it.

        The settings are first: by them the other files of a job are found.
        """
        settings = await asyncio.to_thread(self._settings_of, wanted, incarnation)
        path = self._run_dir / "settings" / f"{wanted.name}.yaml"
        await asyncio.to_thread(write_settings, path, settings)
        if wanted.job_id:
            credential = await self._credentials.credential(
                wanted, worker=wanted.name, incarnation=incarnation
            )
            await asyncio.to_thread(write_secret, self._credential_file(wanted.name), credential)
        await asyncio.to_thread(self._start, wanted, settings, path)

    async def stop(self, name: str, *, grace_s: float) -> None:
        """SIGTERM, the grace, SIGKILL to the whole family."""
        await asyncio.to_thread(self._processes.stop, name, grace_s=grace_s)
        for secret in (self._credential_file(name), self._keys_file(name)):
            if secret is not None:
                discard(secret)
        self._processes.forget(name)  # last: whoever goes on after a crash stops it again

    async def ready(self, name: str) -> bool:
        """Ask for its gRPC health."""
        record = self._processes.find(name)
        if record is None:
            return False
        kind = WorkerKind(record.labels.get("kind", WorkerKind.EXPERIENCE))
        async with connect_as(self._settings, record.labels["address"], kind) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            check: Any = stub.Check  # pyright: ignore[reportAttributeAccessIssue]
            request = health_pb2.HealthCheckRequest()
            try:
                reply = await call(check, request, timeout_s=HEALTH_TIMEOUT_S)
            except PacelineError:
                return False
        serving = reply.status == health_pb2.HealthCheckResponse.SERVING
        if serving:
            self._ready.add(name)
        return serving

    async def last_words(self, name: str) -> str:
        """Its last error and the last lines of its output."""
        return await asyncio.to_thread(self._processes.last_words, name)

    def waits_for(self, job_id: str) -> str:
        """GPUs, if the machine has some and not enough."""
        return self._placements.waits_for(job_id)

    async def close(self) -> None:
        """The processes go on."""
        self._processes.close()

    def _credential_file(self, name: str) -> Path:
        return self._run_dir / "credentials" / name

    def _keys_file(self, name: str) -> Path | None:
        """Next to the controller's, so that only its own container has it."""
        own = self._settings.service_keys
        return None if own is None else own.resolve().parent / "workers" / f"{name}.json"

    def _discard_strays(self) -> None:
        """Remove secrets of processes that a killed controller was about to start."""
        known = {record.name for record in self._processes.records()}
        for secrets in (self._credential_file("*"), self._keys_file("*")):
            if secrets is not None:
                discard_drafts(secrets.parent)
                for path in secrets.parent.glob(secrets.name):
                    if path.name.removesuffix(secrets.suffix) not in known:
                        discard(path)

    def _labels(self) -> dict[str, str]:
        """The controller's settings that its processes must have started with, as labels."""
        keys = "" if self._keys is None else self._keys.digest()
        return {"experience": self._settings.experience, "keys": keys}

    async def _loads(self, record: Record) -> bool:
        """Whether it is alive but has never been ready: large models load for minutes."""
        age_s = time.time() - record.created
        if record.name in self._ready or age_s > self._load_timeout_s or not record.pid:
            return False
        return await asyncio.to_thread(_is_live, record.labels.get("metrics", ""))

    def _observe(self, record: Record, pending: bool) -> Observed:
        return Observed(
            name=record.name,
            job_id=record.labels.get("job", ""),
            alive=self._processes.alive(record.name),
            outdated=any(record.labels.get(k, "") != v for k, v in self._labels().items()),
            pending=pending,
            devices=tuple(int(n) for n in record.labels.get(_DEVICES, "").split(",") if n),
        )

    def _start(self, wanted: Wanted, settings: ServiceSettings, path: Path) -> None:
        if self._keys is not None and settings.service_keys is not None:
            write_secret(settings.service_keys, self._keys.narrowed({wanted.kind}).dumped())
        labels = {
            "job": wanted.job_id,
            "kind": wanted.kind,
            "address": f"{settings.host}:{settings.port}",
            **self._labels(),
            "service": str(wanted.kind),
            "metrics": f"{settings.metrics_host or settings.host}:{settings.metrics_port}",
        }
        command = self._command(wanted, path)
        alone = wanted.kind is WorkerKind.TRAINER and not _by_torchrun(wanted)
        environment = dict(ONLY_RANK) if alone else {}
        if wanted.devices is not None:
            labels[_DEVICES] = ",".join(str(device.index) for device in wanted.devices)
            environment[VISIBLE] = ",".join(device.visible for device in wanted.devices)
        self._ready.discard(wanted.name)
        self._processes.start(
            wanted.name,
            command,
            mark=str(path),
            labels=labels,
            environment=environment,
            forked=not _by_torchrun(wanted),
        )

    def _settings_of(self, wanted: Wanted, incarnation: int) -> ServiceSettings:
        mine, name = self._settings, wanted.name
        options: dict[str, object] = {}
        if wanted.kind is WorkerKind.TRAINER:
            options["incarnation"] = incarnation
        if wanted.kind is WorkerKind.ROLLOUT:
            options["pool"] = wanted.pool
            options["memory_share"] = wanted.memory_share
            if wanted.pool in self._pools:
                options["engines"] = self._pools[wanted.pool].engines
        if wanted.kind is WorkerKind.ENVIRONMENT and self._worlds:
            options["worlds"] = self._worlds
        if wanted.kind in _ASK_OUTSIDE and self._endpoints:
            options["endpoints"] = {
                name: endpoint.model_dump(mode="json") for name, endpoint in self._endpoints.items()
            }
        if wanted.kind in _HAVE_WEIGHTS:
            options["weights_port"] = self._ports.take(f"{name}:weights")
            options["weights_mbit_per_s"] = self._weights_mbit_per_s
            options["weights_transport"] = self._weights_transport
        return ServiceSettings(
            kind=wanted.kind,
            worker_id=name,
            host=mine.host,
            port=self._ports.take(name),
            metrics_host=mine.metrics_host,
            metrics_port=self._ports.take(f"{name}:metrics"),
            site=mine.site,
            run_dir=self._run_dir,
            storage=mine.storage,
            experience=mine.experience,
            job_id=wanted.job_id,
            credential=self._credential_file(name) if wanted.job_id else None,
            grace_s=self._child_grace_s,
            # One certificate for all kinds: what runs as one user could read the others' keys.
            tls=mine.tls,
            service_keys=self._keys_file(name),
            insecure=mine.insecure,
            tracing=mine.tracing,
            limits=mine.limits,
            packages=mine.packages,
            plugins=mine.plugins,
            tokenizers=mine.tokenizers,
            models=mine.models,
            logs=LogSettings(level=mine.logs.level, path=self._run_dir / "logs" / f"{name}.log"),
            supervisor=HeartbeatSettings(path=self._beat, stale_s=self._stale_s),
            options=options,
        )

    def command_of(self, wanted: Wanted, path: Path) -> list[str]:
        """How a process is started: trainers of several ranks by torchrun."""
        module = ["-m", f"paceline_{wanted.kind}", str(path)]
        if not _by_torchrun(wanted):
            return [sys.executable, "-P", *module]
        port = self._ports.take(f"{wanted.name}:master")
        torchrun = [
            *("-m", "torch.distributed.run"),
            *("--nproc-per-node", str(wanted.world_size)),
            *("--master-addr", "127.0.0.1", "--master-port", str(port)),
            *("--max-restarts", "0"),
        ]
        return [sys.executable, "-P", *torchrun, *module]


def _is_live(address: str) -> bool:
    """Whether the process whose metrics are at host:port passes its liveness probe."""
    probe = HTTPConnection(address, timeout=PROBE_TIMEOUT_S)
    try:
        probe.request("GET", "/livez")
        return probe.getresponse().status == HTTPStatus.OK
    except (OSError, HTTPException):
        return False
    finally:
        probe.close()


def _by_torchrun(wanted: Wanted) -> bool:
    return wanted.kind is WorkerKind.TRAINER and wanted.world_size > 1
