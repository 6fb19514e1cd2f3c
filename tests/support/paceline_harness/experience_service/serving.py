"""The service in this process, or as a process that can be killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
)
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
)
from pathlib import Path
from typing import Any

from grpc import aio

from paceline.config import ServiceSettings
from paceline.config.limits import LimitSettings
from paceline.config.service import ExperienceOptions
from paceline.enums import WorkerKind
from paceline.platform.server.chassis import Chassis, bind
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.transport.rpc import SERVER_OPTIONS, ErrorInterceptor, connect
from paceline_experience.service import ExperienceService, build
from paceline_harness.experience_service.clients import LIMIT_S, Client

Make = Callable[[Chassis], Awaitable[ExperienceService]]


@asynccontextmanager
async def serving(
    store_url: str, run_dir: Path, *, make: Make = build, **options: Any
) -> AsyncGenerator[Client]:
    """Run the service once, as `make` puts it together."""
    settings = settings_of(store_url, run_dir, **options)
    metrics = Metrics()
    errors = ErrorInterceptor(metrics=metrics)
    server = aio.server(interceptors=[errors], options=SERVER_OPTIONS)
    address = f"127.0.0.1:{bind(server, settings)}"
    chassis = Chassis(
        settings=settings,
        server=server,
        metrics=metrics,
        address=address,
        authorize=errors.authorize,
    )
    service = await make(chassis)
    await service.start()
    await server.start()
    work = asyncio.create_task(service.run())
    try:
        async with connect(address) as channel:
            client = Client(channel, address)
            try:
                yield client
            finally:
                await client.close()
    finally:
        work.cancel()
        await server.stop(0.1)
        await service.close()


def settings_of(
    store_url: str, run_dir: Path, limits: LimitSettings | None = None, **options: Any
) -> ServiceSettings:
    # Workers without heartbeats stay: tests join workers that exist only in the roster. Leases
    # survive the end of their stream.
    usual = {"sweep_s": 0.05, "store_wait_s": LIMIT_S, "member_lease_s": LIMIT_S}
    usual["lease_return_s"] = LIMIT_S
    wanted = ExperienceOptions.model_validate(usual | options)
    return ServiceSettings(
        kind=WorkerKind.EXPERIENCE,
        worker_id="experience-0",
        run_dir=run_dir,
        store_url=store_url,
        insecure=True,
        limits=limits or LimitSettings(),
        options=wanted.model_dump(),
    )


class Killable:
    """The service as a process that can be killed and restarted at the same address."""

    def __init__(self, store_url: str, run_dir: Path, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        settings = settings_of(store_url, run_dir).model_copy(update={"port": port})
        self._file = run_dir / "settings.yaml"
        self._file.write_text(settings.model_dump_json())
        self._out = run_dir / "experience.out"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "paceline_experience", str(self._file)]
        with self._out.open("ab") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def client(self, channel: aio.Channel) -> Client:
        return Client(channel, self.address)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @asynccontextmanager
    async def connected(self) -> AsyncGenerator[Client]:
        """A client, once the service answers."""
        async with connect(self.address) as channel:
            await asyncio.wait_for(channel.channel_ready(), LIMIT_S)
            client = Client(channel, self.address)
            try:
                yield client
            finally:
                await client.close()


Lives = Callable[..., AbstractAsyncContextManager[Client]]
