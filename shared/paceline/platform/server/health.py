"""Liveness and readiness of a process, served over HTTP by a thread next to its event loop."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app

from paceline.config.service import ProbeSettings
from paceline.errors import UnavailableError
from paceline.platform.server.liveness import ProcessProgress
from paceline.platform.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

REQUEST_TIMEOUT_S = 10.0
TEXT = ("Content-Type", "text/plain; charset=utf-8")
JSON = ("Content-Type", "application/json")


class Health:
    """The state behind the probes, written by the event loop and read by any thread.

    A starting service is alive but not ready: imports and loading may block the loop for minutes.
    Once it serves, the event loop must keep running and the work in `progress` must advance.
    """

    def __init__(
        self,
        *,
        settings: ProbeSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        about: Mapping[str, str] | None = None,
    ) -> None:
        settings = settings or ProbeSettings()
        self.progress = ProcessProgress(settings, clock)
        self._about = about or {}
        self._stuck_s = settings.stuck_s
        self._clock = clock
        self._ticked_s: float | None = None
        self._unready = "starting"

    def serve(self) -> None:
        """Mark the service as accepting calls, unless it is already draining."""
        self._ticked_s = self._clock()
        if self._unready == "starting":
            self._unready = ""

    def drain(self) -> None:
        """Mark the service as accepting no new work."""
        self._unready = "draining"

    def tick(self) -> None:
        """Record that the event loop is running."""
        if self._ticked_s is not None:
            self._ticked_s = self._clock()

    async def beat(self) -> None:
        """Tick until cancelled."""
        while True:
            self.tick()
            self.progress.check()
            await asyncio.sleep(min(1.0, self._stuck_s / 4))

    def why_dead(self) -> str:
        """The reason to restart the process; empty if there is none."""
        silent_s = 0.0 if self._ticked_s is None else self._clock() - self._ticked_s
        if silent_s <= self._stuck_s:
            return self.progress.why_dead()
        return f"the event loop has been blocked for {silent_s:.0f} s; limit {self._stuck_s:g} s"

    def why_unready(self) -> str:
        """The reason to send the process no calls; empty if there is none."""
        return self._unready or self.why_dead() or self.progress.why_unready()

    def status(self) -> dict[str, Any]:
        """The whole state, for `/statusz`."""
        unready = self.why_unready()
        return {
            **self._about,
            "ready": not unready,
            "why_unready": unready,
            "why_dead": self.why_dead(),
            **self.progress.status(),
        }


class Probes:
    """`/livez`, `/readyz`, `/statusz` and `/metrics` over plain HTTP, in threads of their own."""

    def __init__(self, *, host: str, port: int, health: Health, metrics: Metrics) -> None:
        """Bind and serve; raises `UnavailableError` if the port is in use."""
        app = _app(health, make_wsgi_app(metrics.registry))
        kind = _Server6 if ":" in host else _Server
        try:
            self._server = make_server(host, port, app, kind, _Handler)
        except OSError as error:
            raise UnavailableError(
                f"metrics_port {port} on {host} cannot be bound ({error.strerror}); "
                "stop the process that holds it or choose another"
            ) from None
        self.port: int = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="probes", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving and release the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _app(health: Health, metrics: WSGIApplication) -> WSGIApplication:
    reasons = {"/livez": health.why_dead, "/readyz": health.why_unready}

    def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return metrics(environ, start)
        if path == "/statusz":
            start("200 OK", [JSON])
            return [json.dumps(health.status()).encode()]
        if path not in reasons:
            start("404 Not Found", [TEXT])
            return [b"available: /livez, /metrics, /readyz and /statusz\n"]
        reason = reasons[path]()
        start("503 Service Unavailable" if reason else "200 OK", [TEXT])
        return [f"{reason or 'ok'}\n".encode()]

    return answer


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 32


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    # A client that sends nothing must not hold a thread forever.
    timeout = REQUEST_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, since probes arrive every few seconds."""
