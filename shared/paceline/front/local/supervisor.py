"""Supervises the base services on one machine; the controller starts all others.

Needs the `local` extra.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.config.limits import LimitSettings
from paceline.config.plugins import PluginSettings
from paceline.config.sections.model import ModelSettings
from paceline.config.service import (
    HeartbeatSettings,
    LogSettings,
    ServiceSettings,
    TracingSettings,
)
from paceline.config.tokenizers import TokenizerSettings
from paceline.enums import WorkerKind
from paceline.errors import UnavailableError
from paceline.front.local.ports import USUAL_PORT, PortSlots, claim, is_free
from paceline.front.local.processes import Processes
from paceline.front.local.store import EmbeddedStore, check_url
from paceline.platform.beneath import mark_private
from paceline.platform.files import lock_for_life, token_of
from paceline.platform.proxies import DIRECT
from paceline.platform.server.restarts import RestartBackoff
from paceline.platform.server.settings_file import write_settings
from paceline.platform.telemetry.logs import Log
from paceline.platform.telemetry.monitoring import lay_out, targets_of
from paceline.platform.transport.service_keys import FILE, issue, presented_to, read_keys

HOST = "127.0.0.1"
STALE_S = 60.0
KINDS = (WorkerKind.EXPERIENCE, WorkerKind.GATEWAY, WorkerKind.CONTROLLER)
GRACE_S = {WorkerKind.EXPERIENCE: 5.0, WorkerKind.GATEWAY: 3.0, WorkerKind.CONTROLLER: 20.0}
_LOOK_EVERY_S = 0.25
_MOST_FAILURES = 3
log = Log("local")


@dataclass(slots=True)
class _Supervised:
    restarts: RestartBackoff
    settings: ServiceSettings
    path: Path
    running: bool = False
    began_s: float = 0.0


class Local:
    """Starts or adopts the base services of one run directory and keeps them running.

    A killed supervisor leaves them running for a minute; the next one adopts them.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        http_port: int | None = USUAL_PORT,
        store_url: str = "",
        options: Mapping[WorkerKind, Mapping[str, Any]] | None = None,
        tracing: TracingSettings | None = None,
        limits: LimitSettings | None = None,
        tokenizers: TokenizerSettings | None = None,
        models: ModelSettings | None = None,
        plugins: PluginSettings | None = None,
        storage: str = "",
        experience_proxy: str = "",
        kinds: Sequence[WorkerKind] = KINDS,
    ) -> None:
        """`http_port` is the usual one if null and it can be had; 0, or if not: any free one.

        `tokenizers` run in the processes of the services if null: one user owns all jobs.

        All services reach experience at `experience_proxy` (host:port), if there is one.
        Without the controller among `kinds`, nothing else is started, and no job goes on.
        """
        self._kinds = tuple(kinds)
        self.run_dir = run_dir.resolve()
        self._store_url = store_url
        self._options = dict(options or {})
        self._tracing = tracing
        self._limits = limits or LimitSettings()
        self._tokenizers = tokenizers or TokenizerSettings(run_in="in_process")
        self._models = models or ModelSettings()
        self._plugins = plugins or PluginSettings()
        self._storage = storage
        self._experience_proxy = experience_proxy
        self._ports = PortSlots(self.run_dir / "ports.json")
        self._processes = self._processes_of("up")
        self._claims: dict[int, socket.socket] = {}
        self._http_port = self._choose_http_port(http_port)
        self._store: EmbeddedStore | None = None
        self._supervised: dict[WorkerKind, _Supervised] = {}
        self._keys = self.run_dir / "service-keys"
        self._lock: IO[str] | None = None
        self._stopping = threading.Event()
        self._guard = threading.Thread(target=self._supervise, name="local", daemon=True)

    @property
    def url(self) -> str:
        """URL of the REST API."""
        return f"http://{HOST}:{self._http_port}"

    @property
    def token(self) -> str:
        """The bootstrap token, created by the gateway on its first start."""
        return token_of(self.run_dir)

    def start(self, *, timeout_s: float = 60.0) -> str:
        """Start everything; returns the URL of the gateway.

        Raises:
            StateError: another supervisor serves this run directory.
            UnavailableError: the port is in use, the store cannot be reached, or a service
                does not come up.
        """
        self._lock = lock_for_life(self.run_dir / "up.lock", what="a supervisor")
        mark_private(self.run_dir)
        try:
            self._check_http_port()
            lay_out(self.run_dir / "monitoring")
            self._start_store()
            self._beat()
            issue(self._keys, self._kinds)
            for kind in self._kinds:
                self._prepare(kind)
            self._guard.start()
            self._wait_until_ready(timeout_s)
        except BaseException:
            self.stop()
            raise
        return self.url

    def stop(self) -> None:
        """Drain and stop all services: the controller with its children first, the store last."""
        self._stopping.set()
        if self._guard.ident is not None:
            self._guard.join()
        for kind in (WorkerKind.CONTROLLER, WorkerKind.GATEWAY, WorkerKind.EXPERIENCE):
            # Longer than its own grace period, so that it stops its children itself.
            self._processes.stop(kind, grace_s=GRACE_S[kind] + 8.0)
            self._processes.forget(kind)
            if kind is WorkerKind.CONTROLLER:
                self._end_what_it_left()
        if self._store is not None:
            self._store.stop()
        self._processes.close()
        (self.run_dir / "gateway.json").unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()
        for claimed in self._claims.values():
            claimed.close()

    def __enter__(self) -> Local:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _processes_of(self, owner: str) -> Processes:
        folder, logs = self.run_dir / "processes", self.run_dir / "logs"
        targets = targets_of(self.run_dir)
        return Processes(folder=folder, logs=logs, owner=owner, targets=targets)

    def _choose_http_port(self, wanted: int | None) -> int:
        if wanted is None and self._can_have(USUAL_PORT):
            return USUAL_PORT
        # Kept for later starts.
        return wanted or self._port(WorkerKind.GATEWAY, "http")

    def _can_have(self, port: int) -> bool:
        """Whether the gateway may listen there, for as long as this process lives."""
        if self._serves_at(port):
            return True
        if port not in self._claims and (claimed := claim(port)):
            self._claims[port] = claimed
        return port in self._claims and is_free(port, HOST)

    def _serves_at(self, port: int) -> bool:
        """Whether a gateway of this run directory does, since a killed supervisor left it."""
        ours = self._processes.find(WorkerKind.GATEWAY)
        serves = self._processes.alive(WorkerKind.GATEWAY)
        return bool(serves and ours and ours.labels.get("http_port") == str(port))

    def _check_http_port(self) -> None:
        if not self._can_have(self._http_port):
            raise UnavailableError(
                f"port {self._http_port} on {HOST} is in use; "
                "stop the process that holds it or choose another with --port"
            )

    def _start_store(self) -> None:
        if self._store_url:
            check_url(self._store_url)
            return
        self._store = EmbeddedStore(self.run_dir, processes=self._processes)
        self._store.start()
        self._store_url = self._store.url

    def _prepare(self, kind: WorkerKind) -> None:
        """Adopt a service that runs with the same settings and keys; else replace it."""
        path = self.run_dir / "settings" / f"{kind}.yaml"
        before = path.read_text() if path.exists() else ""
        settings = self._settings_of(kind)
        same = write_settings(path, settings) == before
        record = self._processes.find(kind)
        same = same and record is not None and record.labels.get("keys") == self._keys_of(kind)
        adopted = same and self._processes.alive(kind)
        if not adopted:
            self._processes.stop(kind, grace_s=GRACE_S[kind])
        self._supervised[kind] = _Supervised(RestartBackoff(), settings, path, running=adopted)

    def _settings_of(self, kind: WorkerKind) -> ServiceSettings:
        options = dict(self._options.get(kind, {}))
        if kind is WorkerKind.GATEWAY:
            known = self._options.get(WorkerKind.CONTROLLER, {}).get("endpoints", {})
            fixed = {"http_port": self._http_port, "probe_models": True}
            options = {"endpoints": sorted(known), **options, **fixed}
        serves = kind is WorkerKind.EXPERIENCE
        return ServiceSettings(
            kind=kind,
            worker_id=f"{kind}-0",
            host=HOST,
            port=self._port(kind, kind),
            metrics_port=self._port(kind, f"{kind}:metrics"),
            run_dir=self.run_dir,
            experience="" if serves else self._experience(),
            store_url=self._store_url if serves else "",
            service_keys=self._keys / kind / FILE,
            grace_s=GRACE_S[kind],
            logs=LogSettings(path=self.run_dir / "logs" / f"{kind}.log"),
            limits=self._limits,
            tokenizers=self._tokenizers,
            models=self._models,
            plugins=self._plugins,
            storage=self._storage,
            tracing=self._tracing,
            supervisor=HeartbeatSettings(path=self.run_dir / "up.beat", stale_s=STALE_S),
            options=options,
        )

    def _port(self, kind: WorkerKind, slot: str) -> int:
        known = self._ports.known(slot)
        return known if known and self._processes.alive(kind) else self._ports.take(slot)

    def _experience(self) -> str:
        return self._experience_proxy or self._address(WorkerKind.EXPERIENCE)

    def _keys_of(self, kind: WorkerKind) -> str:
        """Changes with the keys of a service."""
        return read_keys(self._keys / kind / FILE).digest()

    def _address(self, kind: WorkerKind) -> str:
        return f"{HOST}:{self._supervised[kind].settings.port}"

    def _supervise(self) -> None:
        beaten_s = 0.0
        while not self._stopping.wait(_LOOK_EVERY_S):
            if time.monotonic() - beaten_s >= 1.0:
                self._beat()
                beaten_s = time.monotonic()
            try:
                self._look()
            except Exception:  # the supervisor boundary of this thread
                log.exception("cannot supervise services")

    def _look(self) -> None:
        self._look_at_store()
        now_s = time.monotonic()
        for kind, service in self._supervised.items():
            if self._processes.alive(kind):
                continue
            if service.running:
                service.running = False
                service.restarts.failed(now_s, lived_s=now_s - service.began_s)
                log.warning("died", process=kind, code=self._processes.exit_code(kind))
            if now_s >= service.restarts.due_s:
                self._launch(kind, service)

    def _look_at_store(self) -> None:
        store = self._store
        if store is not None and not self._processes.alive("store") and not store.answers():
            log.warning("died", process="store")
            store.launch()

    def _launch(self, kind: WorkerKind, service: _Supervised) -> None:
        command = [sys.executable, "-P", "-m", f"paceline_{kind}", str(service.path)]
        labels = {
            "http_port": str(self._http_port),
            "service": str(kind),
            "keys": self._keys_of(kind),
            "metrics": f"{HOST}:{service.settings.metrics_port}",
        }
        mark = str(service.path)
        self._processes.start(kind, command, mark=mark, labels=labels, forked=True)
        service.running = True
        service.began_s = time.monotonic()

    def _wait_until_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        waiting = list(self._kinds)
        while waiting:
            kind = waiting[0]
            if self._is_ready(kind):
                waiting.pop(0)
                continue
            service = self._supervised[kind]
            if service.restarts.failures >= _MOST_FAILURES or time.monotonic() > deadline:
                words = self._processes.last_words(kind)
                raise UnavailableError(f"the {kind} service does not start: {words}")
            time.sleep(0.05)

    def _is_ready(self, kind: WorkerKind) -> bool:
        if kind is WorkerKind.GATEWAY and is_free(self._http_port, HOST):
            return False
        return _serving(self._supervised[kind].settings)

    def _beat(self) -> None:
        (self.run_dir / "up.beat").touch()

    def _end_what_it_left(self) -> None:
        """Stop children that a killed controller could not stop."""
        left = self._processes_of(WorkerKind.CONTROLLER)
        for record in left.records():
            left.stop(record.name, grace_s=1.0)
            left.forget(record.name)


def _serving(settings: ServiceSettings) -> bool:
    metadata = presented_to(settings, settings.kind)
    with grpc.insecure_channel(f"{settings.host}:{settings.port}", options=[DIRECT]) as channel:
        check: Any = health_pb2_grpc.HealthStub(channel).Check  # pyright: ignore[reportAttributeAccessIssue]
        try:
            reply = check(health_pb2.HealthCheckRequest(), timeout=1.0, metadata=metadata)
        except grpc.RpcError:
            return False
    return reply.status == health_pb2.HealthCheckResponse.SERVING
