"""A gateway and an experience service on one event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from paceline.config import ServiceSettings
from paceline.front.client.client import AsyncClient
from paceline.platform.files import token_of
from paceline.platform.server.chassis import Chassis, serve
from paceline_experience import service as experience
from paceline_gateway import service as gateway
from paceline_harness.patience import PATIENCE_S


@dataclass
class Site:
    """Both services, with the tokens of callers."""

    run_dir: Path
    url: str
    grpc: str
    app: Any = None
    experience: str = ""
    tokens: dict[str, str] = field(default_factory=dict[str, str])
    ids: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def bootstrap(self) -> str:
        return token_of(self.run_dir)

    def client(self, who: str = "bootstrap") -> AsyncClient:
        token = self.bootstrap if who == "bootstrap" else self.tokens[who]
        return AsyncClient(self.url, token=token)

    async def ready(self) -> None:
        """Wait until the gateway is ready, which may take several attempts on a busy machine."""
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S) as http:
            while (await http.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.05)

    async def make(self, who: str, *, role: str, tenant: str, **more: Any) -> str:
        async with self.client() as client:
            made = await client.create_token(who, role=role, tenant=tenant, **more)
        self.tokens[who], self.ids[who] = made.secret, made.token.token_id
        return made.secret


class Running:
    """A service running on this event loop."""

    def __init__(self, build: Any, settings: ServiceSettings) -> None:
        self._build = build
        self.made: asyncio.Future[tuple[Chassis, Any]] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(serve(settings, self._note))

    async def _note(self, chassis: Chassis) -> Any:
        service = await self._build(chassis)
        self.made.set_result((chassis, service))
        return service

    async def up(self) -> tuple[Chassis, Any]:
        await asyncio.wait({self.made, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        assert not self._serving.done(), self._serving
        return await self.made

    async def stop(self) -> None:
        chassis, _ = await self.made
        chassis.stop()
        assert await self._serving == 0


@asynccontextmanager
async def serving(
    ledger_settings: ServiceSettings, gateway_settings: ServiceSettings
) -> AsyncGenerator[Site]:
    """Both services with these settings; the gateway's have no address of experience yet."""
    run_dir = gateway_settings.run_dir
    ledger = Running(experience.build, ledger_settings)
    chassis, _ = await ledger.up()
    changed = gateway_settings.model_copy(update={"experience": chassis.address})
    users = Running(gateway.build, changed)
    _, service = await users.up()
    while not (run_dir / "gateway.json").exists():
        await asyncio.sleep(0.01)
    told = json.loads((run_dir / "gateway.json").read_text())
    site = Site(run_dir, told["http"], told["grpc"], service.app, chassis.address)
    await site.ready()
    yield site
    await users.stop()
    await ledger.stop()
