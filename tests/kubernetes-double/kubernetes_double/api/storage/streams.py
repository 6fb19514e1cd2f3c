"""Watch streams over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from kubernetes_double.api.requests.errors import StatusError, whole
from kubernetes_double.api.storage.listing import Query, Watch, revision_of
from kubernetes_double.api.storage.store import Store

Object = dict[str, Any]


@dataclass
class Watches:
    """Serves watches; an idle one sends a bookmark every `bookmark_s`."""

    store: Store
    bookmark_s: float = 60.0
    timeout_s: float = 1800.0
    _open: set[asyncio.Event] = field(default_factory=set[asyncio.Event])
    _closing: bool = False

    def __post_init__(self) -> None:
        self.store.listen(lambda _: self._wake())

    def close(self) -> None:
        """End all streams."""
        self._closing = True
        self._wake()

    def _wake(self) -> None:
        for event in self._open:
            event.set()

    async def serve(self, request: web.Request, query: Query) -> web.StreamResponse:
        """Stream events until the timeout, a disconnect, or a 410.

        Raises 400 for invalid selectors or revisions; later errors are sent as ERROR events.
        """
        start = request.query.get("resourceVersion", "")
        watch = Watch(self.store, query, revision_of(start or "0"))
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        woken = asyncio.Event()
        self._open.add(woken)
        try:
            await self._run(response, watch, woken, request)
        except StatusError as error:
            await _send(response, [{"type": "ERROR", "object": error.body}])
        except (ConnectionError, asyncio.CancelledError):
            return response
        finally:
            self._open.discard(woken)
        return response

    async def _run(
        self,
        response: web.StreamResponse,
        watch: Watch,
        woken: asyncio.Event,
        request: web.Request,
    ) -> None:
        asked = request.query
        loop = asyncio.get_running_loop()
        until = loop.time() + whole("timeoutSeconds", asked.get("timeoutSeconds") or self.timeout_s)
        marks = asked.get("allowWatchBookmarks", "").lower() in ("true", "1")
        if watch.revision == 0:
            await _send(response, watch.initial())
            if marks and asked.get("sendInitialEvents", "").lower() == "true":
                await _send(response, [watch.bookmark(**{"k8s.io/initial-events-end": "true"})])
        marked = loop.time()
        while not self._closing:
            woken.clear()
            await _send(response, watch.pending())
            now = loop.time()
            if marks and (now - marked >= self.bookmark_s or now >= until):
                await _send(response, [watch.bookmark()])
                marked = now
            if now >= until:
                return
            pause = min(until, marked + self.bookmark_s if marks else until) - now
            try:
                await asyncio.wait_for(woken.wait(), max(pause, 0.001))
            except TimeoutError:
                continue


async def _send(response: web.StreamResponse, events: Iterable[Object]) -> None:
    lines = b"".join(json.dumps(event).encode() + b"\n" for event in events)
    if lines:
        await response.write(lines)
