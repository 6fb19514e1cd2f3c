"""Connects to a server, and reconnects when it restarts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from paceline.errors import PacelineError, UnavailableError
from paceline.platform.telemetry.logs import Log
from paceline.platform.transport.rpc import backoff_s
from paceline_rollout.engines.sglang.api import SglangClient
from paceline_rollout.engines.sglang.capabilities import Capabilities
from paceline_rollout.engines.sglang.loading import Loader, LoadOptions
from paceline_rollout.engines.sglang.proof import FirstLoad
from paceline_rollout.engines.sglang.server import Server

MIN_BACKOFF_S = 0.25
MAX_BACKOFF_S = 30.0
log = Log("engine")


@dataclass(frozen=True, slots=True)
class ServerSession:
    """Client and loader of a server, from its start to its end."""

    client: SglangClient
    loader: Loader
    capabilities: Capabilities


class ServerConnection:
    """Starts and restarts a server; `session` is None while none runs."""

    def __init__(self, *, server: Server, load_options: LoadOptions, job_id: str) -> None:
        self.server = server
        self.session: ServerSession | None = None
        self._load_options = load_options
        self._job_id = job_id

    @property
    def live(self) -> ServerSession:
        """The session; raises `UnavailableError` while there is none."""
        if self.session is None:
            raise UnavailableError("the SGLang server is not running")
        return self.session

    async def open(self) -> None:
        """Start the server and connect; raises what `Server.start` does."""
        capabilities = await self.server.start()
        client = SglangClient(self.server.url, api_key=self.server.api_key)
        loader = Loader(
            client=client,
            capabilities=capabilities,
            options=self._load_options,
            proof=FirstLoad(client) if self.server.has_dummies else None,
        )
        self.session = ServerSession(client, loader, capabilities)

    async def reopen(self) -> None:
        """Call `open`, with backoff, until it succeeds."""
        attempt = 0
        while self.session is None:
            await asyncio.sleep(retry_delay_s(attempt))
            attempt += 1
            try:
                await self.open()
            except PacelineError as error:
                log.error("server did not start", job=self._job_id, attempt=attempt, error=error)

    async def drop(self) -> None:
        """Close the session of a server that has ended or is about to."""
        session, self.session = self.session, None
        if session is not None:
            session.loader.reset()
            await session.client.close()


def retry_delay_s(attempt: int) -> float:
    """Seconds to wait before the next attempt."""
    return backoff_s(attempt, base_s=MIN_BACKOFF_S, max_s=MAX_BACKOFF_S)
