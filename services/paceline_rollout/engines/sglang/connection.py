"""A server and the means to talk to it, for as long as one life of the server lasts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from paceline.errors import PacelineError, UnavailableError
from paceline.logs import Log
from paceline.rpc import backoff_s
from paceline_rollout.engines.sglang.api import SglangClient
from paceline_rollout.engines.sglang.capabilities import Capabilities
from paceline_rollout.engines.sglang.loading import Loader, Loading
from paceline_rollout.engines.sglang.server import Server

LEAST_PAUSE_S = 0.25
MOST_PAUSE_S = 30.0
log = Log("engine")


@dataclass(frozen=True, slots=True)
class Link:
    """One life of a server."""

    client: SglangClient
    loader: Loader
    capabilities: Capabilities


class Connection:
    """Starts a server again and again; `link` is None while there is none."""

    def __init__(self, *, server: Server, loading: Loading, job_id: str) -> None:
        self.server = server
        self.link: Link | None = None
        self._loading = loading
        self._job_id = job_id

    @property
    def live(self) -> Link:
        """The link; raises `UnavailableError` while there is none."""
        if self.link is None:
            raise UnavailableError("the SGLang server is not there")
        return self.link

    async def open(self) -> None:
        """Start the server and connect; raises what `Server.start` does."""
        known = await self.server.start()
        client = SglangClient(self.server.url, api_key=self.server.api_key)
        loader = Loader(client=client, capabilities=known, loading=self._loading)
        self.link = Link(client, loader, known)

    async def reopen(self) -> None:
        """Like `open`, as often as it takes."""
        attempt = 0
        while self.link is None:
            await asyncio.sleep(pause_s(attempt))
            attempt += 1
            try:
                await self.open()
            except PacelineError as error:
                log.error("server not started", job=self._job_id, attempt=attempt, error=error)

    async def drop(self) -> None:
        """Close what is open to a server that is gone, or will be."""
        link, self.link = self.link, None
        if link is not None:
            link.loader.leave()
            await link.client.close()


def pause_s(attempt: int) -> float:
    """Before the next attempt."""
    return backoff_s(attempt, base_s=LEAST_PAUSE_S, most_s=MOST_PAUSE_S)
