"""uvicorn on the event loop of the process, hardened against malicious clients."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from paceline.config.service import TlsSettings
from paceline.platform.telemetry.logs import Log
from paceline_gateway.http.framing import StrictConnection

# Open event streams end with the process; their readers reconnect with Last-Event-ID.
SHUTDOWN_S = 1
MAX_HEADER_BYTES = 16 << 10
HEADER_TIMEOUT_S = 10.0
# For a client to read what is ready for it.
SEND_TIMEOUT_S = 60.0
MAX_CONNECTIONS = 1_000
WARN_INTERVAL_S = 10.0
log = Log("web")


class HttpConnection(H11Protocol):
    """A connection with timeouts for its client; uvicorn would wait for ever.

    If there are too many connections, the one that has waited longest for its client is closed:
    one of an honest client waits for milliseconds only.
    """

    header_timeout_s = HEADER_TIMEOUT_S
    send_timeout_s = SEND_TIMEOUT_S
    max_connections = MAX_CONNECTIONS
    warn_interval_s = WARN_INTERVAL_S
    _warned_at = float("-inf")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = StrictConnection(max_head_bytes=MAX_HEADER_BYTES)
        self._waiting_from = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        super().connection_made(transport)  # pyright: ignore[reportArgumentType]
        self._update_timer()
        if len(self.connections) > self.max_connections:
            self._close_longest_waiting()

    def data_received(self, data: bytes) -> None:
        """Bytes of a request have arrived."""
        super().data_received(data)
        self._update_timer()

    def send_400_response(self, msg: str) -> None:
        """A request is malformed: say so, unless an answer has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def on_response_complete(self) -> None:
        """The response is sent, though the request may not be complete."""
        super().on_response_complete()
        self._update_timer()

    def pause_writing(self) -> None:
        """More is ready than the client reads."""
        super().pause_writing()
        self._start_timer(self.send_timeout_s)

    def resume_writing(self) -> None:
        """The client has read most of it."""
        super().resume_writing()
        self._stop_timer()
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has disconnected."""
        super().connection_lost(exc)
        self._stop_timer()

    @property
    def waiting_since(self) -> float | None:
        """Since when the server has waited for the client; None: it is answering a request."""
        return None if self._timer is None else self._waiting_from

    def abort(self) -> None:
        """Close it at once, without waiting until the client has read the rest."""
        self._stop_timer()
        self.transport.abort()

    def _update_timer(self) -> None:
        if self.flow.write_paused:
            return
        cycle = cast(RequestResponseCycle | None, self.cycle)
        if cycle is not None and not cycle.response_complete:
            self._stop_timer()
        elif self._timer is None:
            self._start_timer(self.header_timeout_s)

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._waiting_from = self.loop.time()
        self._timer = self.loop.call_later(seconds, self.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_longest_waiting(self) -> None:
        waiting = [
            connection
            for connection in self.connections
            if isinstance(connection, HttpConnection) and connection.waiting_since is not None
        ]
        self._warn()
        min(waiting, key=lambda connection: connection.waiting_since or 0.0, default=self).abort()

    def _warn(self) -> None:
        """Log at most once per `warn_interval_s`, so that an attack does not fill the disk."""
        now = self.loop.time()
        if now - type(self)._warned_at >= self.warn_interval_s:
            type(self)._warned_at = now
            log.warning("too many connections", number=len(self.connections))


class WebServer(uvicorn.Server):
    """uvicorn with the limits of this module; the chassis handles signals."""

    def __init__(
        self,
        app: object,
        certificate: TlsSettings | None,
        *,
        connection: type[HttpConnection] = HttpConnection,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # pyright: ignore[reportArgumentType]
                ssl_certfile=certificate and certificate.certificate,
                ssl_keyfile=certificate and certificate.key,
                log_config=None,
                access_log=False,
                http=connection,
                # The caller is the peer of the connection: forwarding headers can be forged.
                proxy_headers=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=SHUTDOWN_S,
            )
        )

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signal handlers alone."""
        yield
