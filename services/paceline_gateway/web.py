"""uvicorn as a guest on our loop, for clients that mean harm."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from paceline.config.service import TlsSettings
from paceline.logs import Log

# Open event streams end with the process; their readers come back with Last-Event-ID.
SHUTDOWN_S = 1
MAX_HEADER_BYTES = 16 << 10
HEADER_S = 10.0
# For a client to take what is ready for it.
SEND_S = 60.0
MAX_CONNECTIONS = 1_000
SAY_EVERY_S = 10.0
log = Log("web")


class Connection(H11Protocol):
    """A connection whose client sends and reads in time; uvicorn waits for ever.

    When there are too many connections, the one that has waited longest for its client makes
    room: that of an honest client waits for milliseconds only.
    """

    header_s = HEADER_S
    send_s = SEND_S
    max_connections = MAX_CONNECTIONS
    say_every_s = SAY_EVERY_S
    _said = float("-inf")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._since = 0.0
        self._limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is here."""
        super().connection_made(transport)  # pyright: ignore[reportArgumentType]
        self._look()
        if len(self.connections) > self.max_connections:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        """Some bytes of a request."""
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """The answer is sent, though maybe not all of the request has come."""
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        """More is ready than the client takes."""
        super().pause_writing()
        self._wait(self.send_s)

    def resume_writing(self) -> None:
        """The client has taken most of it."""
        super().resume_writing()
        self._stop()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        super().connection_lost(exc)
        self._stop()

    @property
    def waiting_since(self) -> float | None:
        """Since when the client neither asks nor reads; None: a request is being answered."""
        return None if self._limit is None else self._since

    def cut(self) -> None:
        """End it at once; to close it would wait until the client has read the rest."""
        self._stop()
        self.transport.abort()

    def _look(self) -> None:
        if self.flow.write_paused:
            return
        cycle = cast(RequestResponseCycle | None, self.cycle)
        if cycle is not None and not cycle.response_complete:
            self._stop()
        elif self._limit is None:
            self._wait(self.header_s)

    def _wait(self, seconds: float) -> None:
        self._stop()
        self._since = self.loop.time()
        self._limit = self.loop.call_later(seconds, self.cut)

    def _stop(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _make_room(self) -> None:
        waiting = [
            each
            for each in self.connections
            if isinstance(each, Connection) and each.waiting_since is not None
        ]
        self._say()
        min(waiting, key=lambda each: each.waiting_since or 0.0, default=self).cut()

    def _say(self) -> None:
        """One event in a while for all connections: who opens too many fills no disk."""
        now = self.loop.time()
        if now - type(self)._said >= self.say_every_s:
            type(self)._said = now
            log.warning("too many connections", number=len(self.connections))


class Web(uvicorn.Server):
    """uvicorn within the limits of this module; signals are the chassis's."""

    def __init__(
        self,
        app: object,
        certificate: TlsSettings | None,
        *,
        connection: type[Connection] = Connection,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # pyright: ignore[reportArgumentType]
                ssl_certfile=certificate and certificate.certificate,
                ssl_keyfile=certificate and certificate.key,
                log_config=None,
                access_log=False,
                http=connection,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                # Who calls is the peer of the connection; headers that say otherwise are anybody's.
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
