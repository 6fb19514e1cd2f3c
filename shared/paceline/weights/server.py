"""Serves snapshots to peers, chunk by chunk over HTTP, also while they are still being filled."""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections import defaultdict
from collections.abc import Callable

from aiohttp import web

from paceline.callers import WEIGHTS, Refusals
from paceline.config.service import TlsSettings
from paceline.errors import IntegrityError, StateError, UnavailableError
from paceline.logs import Log
from paceline.metrics import Metrics
from paceline.tls import peer_kinds, server_context
from paceline.weights import frames
from paceline.weights.encoder import Encoder
from paceline.weights.manifest import Header
from paceline.weights.memory import Pool
from paceline.weights.outlet import Outlet
from paceline.weights.pace import Pace
from paceline.weights.route import TransferProgress
from paceline.weights.seals import pull_token
from paceline.weights.staging import Staging

log = Log("weights")

_KEPT = 2
_WAITING_S = 0.1  # between two signs of life
_NOT_YET_S = 0.25  # a version may be asked for a little before it is offered
_BUFFER_BYTES = 1 << 20
_PATIENCE_S = 30.0  # a chunk may take so long on its way


class WeightServer:
    """Serves the snapshots of this process to peers that know the key of their job.

    `bytes_per_s` caps what all peers together get; 0: no cap. With `patient`, the
    oldest version of each job that still reaches a peer is held as well, so that peers much slower
    than the publications get some version whole. `clock` gives seconds.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int = 0,
        advertise_host: str = "",
        metrics: Metrics | None = None,
        tls: TlsSettings | None = None,
        bytes_per_s: float = 0.0,
        patient: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._port = port
        self._advertise = advertise_host or host
        self._metrics = metrics
        self._tls = tls
        self._refusals = Refusals(metrics)
        self._pool = Pool()
        self._pace = Pace(bytes_per_s, clock=clock)
        self._patient = patient
        self._clock = clock
        self._encoders: dict[tuple[Staging, int], Encoder] = {}
        self._held: dict[tuple[str, int], Staging] = {}
        self._streams = defaultdict[Staging, dict[asyncio.Transport, float]](dict)  # moved when
        self._expected: dict[str, tuple[int, bytes]] = {}  # of each job, a version and its key
        self._news = asyncio.Event()
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Bind; the endpoint under which peers reach this server.

        Raises:
            UnavailableError: the port is taken.
            ConfigError: a file of `tls` is missing or wrong.
        """
        context = None if self._tls is None else server_context(self._tls)
        app = web.Application(client_max_size=frames.MAX_REQUEST_BYTES)
        app.router.add_post("/weights/{job_id}/{version:\\d{1,18}}", self._serve)
        runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.5, handler_cancellation=True
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port, ssl_context=context).start()
        except OSError as error:
            await runner.cleanup()
            raise UnavailableError(
                f"weights: {self._host}:{self._port} cannot be bound: {error}"
            ) from error
        self._runner = runner
        scheme = "http" if context is None else "https"
        return f"{scheme}://{self._advertise}:{runner.addresses[0][1]}"

    def stage(
        self, header: Header, *, key: bytes = b"", part: int = 0, parts: int = 1, keep: int = -1
    ) -> Staging:
        """Room for a snapshot, offered to peers before its first chunk is here.

        Of the job only the newest whole version and `keep` stay beside it, and it is given the
        memory of the one that goes. Raises `StateError` when there is no memory.
        """
        self.make_room(header.job_id, header.version, keep=keep)
        memory = self._pool.take(header.num_bytes)
        staging = Staging(header, key=key, part=part, parts=parts, memory=memory)
        self._hold(staging)
        return staging

    def make_room(self, job_id: str, version: int, *, keep: int = -1) -> None:
        """Drop what `stage` of that version would; streams end meanwhile and free its memory."""
        mine = [held.header.version for held in self._of(job_id) if held.complete]
        whole = max((found for found in mine if found != version), default=-1)
        self._outdate(job_id, {whole, keep})

    def expect(self, job_id: str, version: int, *, key: bytes = b"", keep: int = -1) -> None:
        """Make room for a version that will be staged; peers that ask for it are told to wait."""
        self.make_room(job_id, version, keep=keep)
        self._expected[job_id] = (version, key)
        self._tell()

    def offer(self, staging: Staging, *, keep: int = -1) -> None:
        """Serve a snapshot; of each job the two newest versions and `keep` are held."""
        self._hold(staging)
        job_id = staging.header.job_id
        mine = sorted(held.header.version for held in self._of(job_id))
        self._outdate(job_id, {*mine[-_KEPT:], keep})

    def drop(self, job_id: str, version: int) -> None:
        """Hold or expect a version no longer; streams of it are cut."""
        if self._is_expected(job_id, version):
            del self._expected[job_id]
            self._tell()
        self._drop(job_id, {held.header.version for held in self._of(job_id)} - {version})

    def held(self, job_id: str, version: int) -> Staging | None:
        """A version held, whole or in part."""
        return self._held.get((job_id, version))

    def versions(self) -> list[int]:
        """Versions held, whole or in part."""
        return sorted(version for _, version in self._held)

    def progress(self) -> list[TransferProgress]:
        """How much there is of each version held."""
        return [
            TransferProgress(version, staging.num_ready, staging.header.num_chunks)
            for (_, version), staging in sorted(self._held.items())
        ]

    async def close(self) -> None:
        """Stop serving; open streams are cut."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _of(self, job_id: str) -> list[Staging]:
        return [staging for (job, _), staging in self._held.items() if job == job_id]

    def _hold(self, staging: Staging) -> None:
        self._held[staging.header.job_id, staging.header.version] = staging
        self._tell()

    def _is_expected(self, job_id: str, version: int) -> bool:
        return job_id in self._expected and self._expected[job_id][0] == version

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _outdate(self, job_id: str, kept: set[int]) -> None:
        """Drop all but these, and but the oldest of the others that still reaches a peer."""
        old = [each for each in self._of(job_id) if each.header.version not in kept]
        moving = [each.header.version for each in old if self._patient and self._is_moving(each)]
        self._drop(job_id, {*kept, *sorted(moving)[:1]})

    def _is_moving(self, staging: Staging) -> bool:
        moved_s = self._streams.get(staging, {}).values()
        return self._clock() - max(moved_s, default=-math.inf) < _PATIENCE_S

    def _drop(self, job_id: str, kept: set[int]) -> None:
        for staging in self._of(job_id):
            version = staging.header.version
            if version not in kept:
                del self._held[job_id, version]
                for pair in [
                    p for p in self._encoders if staging in (p[0], self._encoders[p].base)
                ]:
                    del self._encoders[pair]
                # Else a slow peer would keep its memory.
                for transport in self._streams.pop(staging, ()):
                    transport.abort()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self._check_peer(request)
        job_id, version = request.match_info["job_id"], int(request.match_info["version"])
        await self._find(job_id, version)
        self._check_token(request, job_id, version)
        try:
            asked = frames.parse_request(await request.read())
        except IntegrityError as error:
            log.warning("bad request", peer=request.remote, job=job_id, error=error)
            raise web.HTTPBadRequest(text=str(error)) from None
        response = web.StreamResponse()
        response.content_type = "application/octet-stream"
        transport = request.transport
        if transport is None:
            return response  # the peer has gone
        try:
            await response.prepare(request)
            transport.set_write_buffer_limits(high=_BUFFER_BYTES)
            staging = await self._staged(response, job_id, version)
            await self._send(response, staging, asked, transport)
        except (StateError, ConnectionError):
            transport.abort()
        return response

    async def _find(self, job_id: str, version: int) -> None:
        """Until it is held or expected, for a moment."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + _NOT_YET_S
        while not self._is_expected(job_id, version) and (job_id, version) not in self._held:
            if any(held.header.version > version for held in self._of(job_id)):
                raise web.HTTPGone(text=f"version {version} is not held any more")
            try:
                async with asyncio.timeout_at(end_s):
                    await self._news.wait()
            except TimeoutError:
                raise web.HTTPNotFound(text=f"version {version} is not held") from None

    def _check_peer(self, request: web.Request) -> None:
        transport, tls = request.transport, self._tls
        if tls is None or transport is None:
            return
        kinds = peer_kinds(transport, tls.peer_name)
        if not WEIGHTS.isdisjoint(kinds):
            return
        self._refusals.add("weights", kinds)
        raise web.HTTPForbidden(text="weights are for trainers and rollout workers")

    def _check_token(self, request: web.Request, job_id: str, version: int) -> None:
        held = self._held.get((job_id, version))
        key = held.key if held is not None else self._expected[job_id][1]
        shown = request.headers.get("Authorization", "").encode()
        if key and not hmac.compare_digest(shown, f"Bearer {pull_token(key)}".encode()):
            raise web.HTTPForbidden(text="the token is not of this job's key")

    async def _staged(self, response: web.StreamResponse, job_id: str, version: int) -> Staging:
        """A version once it is held, with signs of life until then."""
        while (staging := self._held.get((job_id, version))) is None:
            if not self._is_expected(job_id, version):
                raise StateError(f"weights: version {version} is not expected any more")
            try:
                async with asyncio.timeout(_WAITING_S):
                    await self._news.wait()
            except TimeoutError:
                await response.write(frames.waiting_frame(0))
        return staging

    async def _send(
        self,
        response: web.StreamResponse,
        staging: Staging,
        asked: frames.Request,
        transport: asyncio.Transport,
    ) -> None:
        self._streams[staging][transport] = self._clock()
        try:
            await self._outlet(response, staging, asked, transport).send()
        finally:
            self._streams[staging].pop(transport, None)
            if not self._streams[staging]:
                del self._streams[staging]

    def _outlet(
        self,
        response: web.StreamResponse,
        staging: Staging,
        asked: frames.Request,
        transport: asyncio.Transport,
    ) -> Outlet:
        job_id = staging.header.job_id

        def count(num_bytes: int, is_delta: bool) -> None:
            if transport in self._streams.get(staging, {}):
                self._streams[staging][transport] = self._clock()
            self._count(job_id, num_bytes, is_delta)

        return Outlet(
            write=response.write,
            staging=staging,
            asked=asked,
            encoder=lambda: self._encoder(staging, asked.base_version),
            pace=self._pace,
            count=count,
        )

    def _encoder(self, staging: Staging, base_version: int | None) -> Encoder | None:
        """For a base that is held and laid out in the same way."""
        if base_version is None:
            return None
        if (staging, base_version) in self._encoders:
            return self._encoders[staging, base_version]
        job_id = staging.header.job_id
        base = self._held.get((job_id, base_version))
        if base is None or not base.complete or not base.header.same_layout(staging.header):
            return None
        encoder = Encoder(staging, base, observe=lambda took_s: self._encoded(job_id, took_s))
        self._encoders[staging, base_version] = encoder
        return encoder

    def _encoded(self, job_id: str, took_s: float) -> None:
        if self._metrics is not None:
            self._metrics.add("weight_seconds", took_s, job=job_id, stage="encode")

    def _count(self, job_id: str, num_bytes: int, is_delta: bool) -> None:
        if self._metrics is not None:
            kind = "delta" if is_delta else "full"
            self._metrics.add("weight_bytes", num_bytes, job=job_id, direction="out", kind=kind)
