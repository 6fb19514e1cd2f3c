"""Serves snapshots to peers, chunk by chunk over HTTP, even while they are being filled."""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections import defaultdict
from collections.abc import Callable

from aiohttp import web

from paceline.config.service import TlsSettings
from paceline.errors import (
    IntegrityError,
    NotFoundError,
    PermissionDeniedError,
    StateError,
    UnavailableError,
    VersionGoneError,
)
from paceline.platform.telemetry.logs import Log
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.transport.rpc_authorization import WEIGHT_PEERS, RefusedCallers
from paceline.platform.transport.tls import peer_kinds, server_context
from paceline.weights.route import TransferProgress
from paceline.weights.snapshot.manifest import SnapshotHeader
from paceline.weights.snapshot.memory import SharedMemory, SharedMemoryPool
from paceline.weights.snapshot.staging import Staging
from paceline.weights.snapshot.verification import pull_token
from paceline.weights.stream import frames
from paceline.weights.stream.chunk_writer import ChunkWriter
from paceline.weights.stream.delta_encoder import Encoder
from paceline.weights.stream.rate_limit import RateLimit

log = Log("weights")

_NUM_KEPT = 2
_KEEPALIVE_S = 0.1
_NOT_FOUND_GRACE_S = 0.25  # a peer may request a version just before it is offered
_BUFFER_BYTES = 1 << 20
_MAX_CHUNK_S = 30.0  # a stream without a chunk for longer has stopped


class WeightServer:
    """Serves the snapshots of this process to peers that know the key of their job.

    `bytes_per_s` caps what is sent to all peers together; 0: no cap. With `keep_streaming`, the
    oldest version of each job that is still being sent is kept too, so that peers much slower
    than publications receive some version completely. `clock` gives seconds.
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
        keep_streaming: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._port = port
        self._advertise = advertise_host or host
        self._metrics = metrics
        self._tls = tls
        self._refusals = RefusedCallers(metrics)
        self._pool = SharedMemoryPool()
        self._pace = RateLimit(bytes_per_s, clock=clock)
        self._keep_streaming = keep_streaming
        self._clock = clock
        self._encoders: dict[tuple[Staging, int], Encoder] = {}
        self._held: dict[tuple[str, int], Staging] = {}
        self._streams = defaultdict[Staging, dict[asyncio.Transport, float]](
            dict
        )  # time of the last chunk
        self._expected: dict[str, tuple[int, bytes]] = {}  # by job: version and key
        self._changed = asyncio.Event()
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Bind the port; returns the endpoint for peers.

        Raises:
            UnavailableError: the port is taken.
            ConfigError: a file of `tls` is missing or invalid.
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
        self,
        header: SnapshotHeader,
        *,
        key: bytes = b"",
        part: int = 0,
        parts: int = 1,
        keep: int = -1,
        memory: SharedMemory | None = None,
    ) -> Staging:
        """Allocate a staging, which is offered to peers before its first chunk is ready.

        Of the job's other versions only the newest complete one and `keep` are kept, so that the
        memory of the dropped one can be reused. `memory` is where another process fills the bytes
        in; none is allocated then. Raises `StateError` when out of memory.
        """
        self.make_room(header.job_id, header.version, keep=keep)
        memory = memory or self._pool.take(header.num_bytes)
        staging = Staging(header, key=key, part=part, parts=parts, memory=memory)
        self._hold(staging)
        return staging

    def reuse(self, buffers: int) -> None:
        """Expect so many snapshots at once: those of others stay in use here after they are served.

        The memory of fewer would be freed and allocated again for each version.
        """
        self._pool.limit = max(self._pool.limit, buffers)

    def make_room(self, job_id: str, version: int, *, keep: int = -1) -> None:
        """Drop what `stage` would drop for this version, early, so that streams free its memory."""
        complete = [held.header.version for held in self._of(job_id) if held.complete]
        whole = max((found for found in complete if found != version), default=-1)
        self._outdate(job_id, {whole, keep})

    def expect(self, job_id: str, version: int, *, key: bytes = b"", keep: int = -1) -> None:
        """Make room for a version that will be staged; peers that request it wait."""
        self.make_room(job_id, version, keep=keep)
        self._expected[job_id] = (version, key)
        self._notify()

    def offer(self, staging: Staging, *, keep: int = -1) -> None:
        """Serve a snapshot; the two newest versions of the job and `keep` are kept."""
        self._hold(staging)
        job_id = staging.header.job_id
        versions = sorted(held.header.version for held in self._of(job_id))
        self._outdate(job_id, {*versions[-_NUM_KEPT:], keep})

    def drop(self, job_id: str, version: int) -> None:
        """Stop holding or expecting a version; its streams are aborted."""
        if self._is_expected(job_id, version):
            del self._expected[job_id]
            self._notify()
        self._drop(job_id, {held.header.version for held in self._of(job_id)} - {version})

    def held(self, job_id: str, version: int) -> Staging | None:
        """The staging of a version, complete or partial; None if not held."""
        return self._held.get((job_id, version))

    async def find(self, job_id: str, version: int, *, token: str) -> None:
        """Wait briefly until a version is held or expected, and check the token of a peer.

        Raises:
            NotFoundError: it is neither.
            VersionGoneError: only newer ones are held.
            PermissionDeniedError: the token is not that of this job.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + _NOT_FOUND_GRACE_S
        while not self._is_expected(job_id, version) and (job_id, version) not in self._held:
            if any(held.header.version > version for held in self._of(job_id)):
                raise VersionGoneError(f"version {version} is no longer held")
            try:
                async with asyncio.timeout_at(end_s):
                    await self._changed.wait()
            except TimeoutError:
                raise NotFoundError(f"version {version} is not held") from None
        held = self._held.get((job_id, version))
        key = held.key if held is not None else self._expected[job_id][1]
        if key and not hmac.compare_digest(token.encode(), pull_token(key).encode()):
            raise PermissionDeniedError("the token does not match this job's key")

    async def staged(self, job_id: str, version: int, *, timeout_s: float) -> Staging | None:
        """Wait until a version is held; None after `timeout_s`.

        Raises:
            StateError: it is no longer expected.
        """
        end_s = asyncio.get_running_loop().time() + timeout_s
        while (staging := self._held.get((job_id, version))) is None:
            if not self._is_expected(job_id, version):
                raise StateError(f"weights: version {version} is no longer expected")
            try:
                async with asyncio.timeout_at(end_s):
                    await self._changed.wait()
            except TimeoutError:
                return None
        return staging

    def versions(self) -> list[int]:
        """Versions held, complete or partial."""
        return sorted(version for _, version in self._held)

    def progress(self) -> list[TransferProgress]:
        """Progress of each version held."""
        return [
            TransferProgress(version, staging.num_ready, staging.header.num_chunks)
            for (_, version), staging in sorted(self._held.items())
        ]

    async def close(self) -> None:
        """Stop serving; open streams are aborted."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _of(self, job_id: str) -> list[Staging]:
        return [staging for (job, _), staging in self._held.items() if job == job_id]

    def _hold(self, staging: Staging) -> None:
        self._held[staging.header.job_id, staging.header.version] = staging
        self._notify()

    def _is_expected(self, job_id: str, version: int) -> bool:
        return job_id in self._expected and self._expected[job_id][0] == version

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _outdate(self, job_id: str, kept: set[int]) -> None:
        """Drop all versions but these and the oldest of the others that is still being sent."""
        old = [each for each in self._of(job_id) if each.header.version not in kept]
        streaming = [
            each.header.version for each in old if self._keep_streaming and self._is_streaming(each)
        ]
        self._drop(job_id, {*kept, *sorted(streaming)[:1]})

    def _is_streaming(self, staging: Staging) -> bool:
        sent_s = self._streams.get(staging, {}).values()
        return self._clock() - max(sent_s, default=-math.inf) < _MAX_CHUNK_S

    def _drop(self, job_id: str, kept: set[int]) -> None:
        for staging in self._of(job_id):
            version = staging.header.version
            if version not in kept:
                del self._held[job_id, version]
                for pair in [
                    p for p in self._encoders if staging in (p[0], self._encoders[p].base)
                ]:
                    del self._encoders[pair]
                # Otherwise a slow peer would keep the memory in use.
                for transport in self._streams.pop(staging, ()):
                    transport.abort()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self._check_peer(request)
        job_id, version = request.match_info["job_id"], int(request.match_info["version"])
        try:
            presented = request.headers.get("Authorization", "").removeprefix("Bearer ")
            await self.find(job_id, version, token=presented)
        except NotFoundError as error:
            raise web.HTTPNotFound(text=error.message) from None
        except VersionGoneError as error:
            raise web.HTTPGone(text=error.message) from None
        except PermissionDeniedError as error:
            raise web.HTTPForbidden(text=error.message) from None
        try:
            requested = frames.parse_request(await request.read())
        except IntegrityError as error:
            log.warning("bad request", peer=request.remote, job=job_id, error=error)
            raise web.HTTPBadRequest(text=str(error)) from None
        response = web.StreamResponse()
        response.content_type = "application/octet-stream"
        transport = request.transport
        if transport is None:
            return response  # the peer has disconnected
        try:
            await response.prepare(request)
            transport.set_write_buffer_limits(high=_BUFFER_BYTES)
            staging = await self._staged(response, job_id, version)
            await self._send(response, staging, requested, transport)
        except (StateError, ConnectionError):
            transport.abort()
        return response

    def _check_peer(self, request: web.Request) -> None:
        transport, tls = request.transport, self._tls
        if tls is None or transport is None:
            return
        kinds = peer_kinds(transport, tls.peer_name)
        if not WEIGHT_PEERS.isdisjoint(kinds):
            return
        self._refusals.add("weights", kinds)
        raise web.HTTPForbidden(text="weights are for trainers and rollout workers")

    async def _staged(self, response: web.StreamResponse, job_id: str, version: int) -> Staging:
        """Wait until a version is held, sending keepalives."""
        while (staging := await self.staged(job_id, version, timeout_s=_KEEPALIVE_S)) is None:
            await response.write(frames.waiting_frame(0))
        return staging

    async def _send(
        self,
        response: web.StreamResponse,
        staging: Staging,
        requested: frames.ChunkRequest,
        transport: asyncio.Transport,
    ) -> None:
        self._streams[staging][transport] = self._clock()
        try:
            await self._writer(response, staging, requested, transport).send()
        finally:
            self._streams[staging].pop(transport, None)
            if not self._streams[staging]:
                del self._streams[staging]

    def _writer(
        self,
        response: web.StreamResponse,
        staging: Staging,
        requested: frames.ChunkRequest,
        transport: asyncio.Transport,
    ) -> ChunkWriter:
        job_id = staging.header.job_id

        def count(num_bytes: int, is_delta: bool) -> None:
            if transport in self._streams.get(staging, {}):
                self._streams[staging][transport] = self._clock()
            self._count(job_id, num_bytes, is_delta)

        return ChunkWriter(
            write=response.write,
            staging=staging,
            request=requested,
            encoder=lambda: self._encoder(staging, requested.base_version),
            pace=self._pace,
            count=count,
        )

    def _encoder(self, staging: Staging, base_version: int | None) -> Encoder | None:
        """The encoder against a base, if that is held complete and has the same layout."""
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
