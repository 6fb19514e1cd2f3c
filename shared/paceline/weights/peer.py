"""Serves snapshots to peers and pulls them from peers; bulk bytes over HTTP, chunk by chunk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NoReturn
from urllib.parse import quote

from aiohttp import web

from paceline.errors import (
    DeadlineError,
    IntegrityError,
    NotFoundError,
    PacelineError,
    StateError,
    UnavailableError,
)
from paceline.metrics import Metrics
from paceline.v1 import weights_pb2 as pb
from paceline.weights import manifest
from paceline.weights.chunks import Staging
from paceline.weights.manifest import DIGEST_BYTES, Header, Seals, frame, header_to
from paceline.weights.stream import Response, get

log = logging.getLogger(__name__)

_KEPT = 2
_STALL_S = 10.0
_PATIENCE_S = 1.0
_OFF_LOOP_BYTES = 1 << 20


class WeightServer:
    """Serves the snapshots of this process, also while they are still being filled."""

    def __init__(
        self,
        *,
        host: str,
        port: int = 0,
        advertise_host: str = "",
        metrics: Metrics | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._advertise = advertise_host or host
        self._metrics = metrics
        self._held: dict[tuple[str, int], Staging] = {}
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Bind; the endpoint under which peers reach this server."""
        app = web.Application()
        app.router.add_get("/weights/{job_id}/{version:\\d+}", self._serve)
        runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.5, handler_cancellation=True
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port).start()
        except OSError as error:
            await runner.cleanup()
            raise UnavailableError(
                f"weights: {self._host}:{self._port} cannot be bound: {error}"
            ) from error
        self._runner = runner
        return f"http://{self._advertise}:{runner.addresses[0][1]}"

    def offer(self, staging: Staging, *, keep: int = -1) -> None:
        """Serve a snapshot; of each job the two newest versions and `keep` are held."""
        job_id = staging.header.job_id
        self._held[job_id, staging.header.version] = staging
        mine = sorted(version for job, version in self._held if job == job_id)
        for version in mine[:-_KEPT]:
            if version != keep:
                del self._held[job_id, version]

    def versions(self) -> list[int]:
        """Versions held, whole or in part."""
        return sorted(version for _, version in self._held)

    async def close(self) -> None:
        """Stop serving; open streams are cut."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        version = int(request.match_info["version"])
        staging = self._held.get((request.match_info["job_id"], version))
        if staging is None:
            raise web.HTTPNotFound(text=f"version {version} is not held")
        first = request.query.get("from", "0")
        if not first.isdecimal() or int(first) > staging.header.num_chunks:
            raise web.HTTPBadRequest(text=f"from: {first!r} is not a chunk of this snapshot")
        response = web.StreamResponse()
        response.content_type = "application/octet-stream"
        response.content_length = _stream_bytes(staging, int(first))
        await response.prepare(request)
        try:
            await self._send(response, staging, int(first))
        except StateError:
            # The length was announced, so a cut connection tells the peer to resume elsewhere.
            request.protocol.force_close()
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _send(self, response: web.StreamResponse, staging: Staging, first: int) -> None:
        await response.write(staging.header_frame())
        for index in range(first, staging.header.num_chunks):
            await staging.wait(index)
            data = staging.slot(index)
            await response.write(staging.chunk_frame(index))
            await response.write(data.toreadonly())
            self._count(staging.header.job_id, data.nbytes)
        await staging.wait(staging.header.num_chunks)
        await response.write(staging.trailer_frame())

    def _count(self, job_id: str, num_bytes: int) -> None:
        if self._metrics is not None:
            self._metrics.add("weight_bytes", num_bytes, job=job_id, direction="out")


def _stream_bytes(staging: Staging, first: int) -> int:
    header = staging.header
    digest = bytes(DIGEST_BYTES)
    total = len(staging.header_frame())
    for index in range(first, header.num_chunks):
        start, end = header.chunk_range(index)
        head = pb.ChunkHead(index=index, num_bytes=end - start, digest=digest)
        total += manifest.LENGTH.size + head.ByteSize() + end - start
    authentication = digest if staging.key else b""
    return total + len(frame(pb.SnapshotTrailer(root=digest, authentication=authentication)))


async def pull(
    endpoints: Sequence[str],
    *,
    job_id: str,
    version: int,
    into: Callable[[Header], Staging],
    timeout_s: float,
    key: bytes = b"",
) -> Staging:
    """Fetch a version from the first endpoint that works.

    `into` is called once, with the header, and makes the staging; when an endpoint fails midway
    the next one goes on from the first missing chunk. Raises `IntegrityError`,
    `UnavailableError` or `DeadlineError`; what was staged is abandoned then.
    """
    puller = _Pull(job_id=job_id, version=version, into=into, key=key)
    try:
        async with asyncio.timeout(timeout_s):
            return await puller.run(endpoints)
    except TimeoutError:
        raise DeadlineError(
            f"weights: version {version} did not arrive in {timeout_s} s"
            f" ({puller.num_ready} chunks did)"
        ) from None
    finally:
        puller.close()


class _Pull:
    def __init__(
        self, *, job_id: str, version: int, into: Callable[[Header], Staging], key: bytes
    ) -> None:
        self._job_id = job_id
        self._version = version
        self._into = into
        self._key = key
        self._staging: Staging | None = None

    @property
    def num_ready(self) -> int:
        return self._staging.num_ready if self._staging else 0

    def close(self) -> None:
        if self._staging is not None and not self._staging.complete:
            self._staging.abandon()

    async def run(self, endpoints: Sequence[str]) -> Staging:
        loop = asyncio.get_running_loop()
        errors: dict[str, PacelineError] = {}
        moved_s, pause_s, ready = loop.time(), 0.02, 0
        while loop.time() - moved_s < _PATIENCE_S:
            for endpoint in endpoints:
                try:
                    return await self._from(endpoint)
                except (UnavailableError, NotFoundError, IntegrityError) as error:
                    log.info(
                        "pull failed job=%s version=%d endpoint=%s ready=%d error=%s",
                        *(self._job_id, self._version, endpoint, self.num_ready, error),
                    )
                    errors[endpoint] = error
            if self.num_ready > ready:
                moved_s, pause_s, ready = loop.time(), 0.02, self.num_ready
            await asyncio.sleep(pause_s)
            pause_s *= 2
        self._give_up(errors)

    def _give_up(self, errors: dict[str, PacelineError]) -> NoReturn:
        told = "; ".join(str(error) for error in errors.values()) or "no endpoint"
        damaged = any(isinstance(error, IntegrityError) for error in errors.values())
        raise (IntegrityError if damaged else UnavailableError)(
            f"weights: version {self._version} of {self._job_id}: {told}"
        )

    async def _from(self, endpoint: str) -> Staging:
        path = f"/weights/{quote(self._job_id, safe='')}/{self._version}?from={self.num_ready}"
        try:
            async with asyncio.timeout(_STALL_S):
                response = await get(endpoint, path)
        except TimeoutError:
            raise UnavailableError(f"weights: {endpoint} does not answer") from None
        try:
            return await self._read(response)
        finally:
            response.close()

    async def _read(self, response: Response) -> Staging:
        staging = self._open(*manifest.parse_header(await self._frame(response)))
        for index in range(staging.num_ready, staging.header.num_chunks):
            slot = staging.slot(index)
            head = await self._frame(response)
            at, num_bytes, digest = manifest.parse_chunk_head(head)
            if at != index or num_bytes != slot.nbytes:
                raise IntegrityError(f"weights: chunk {at} came in the place of {index}")
            await self._bounded(response, slot)
            if slot.nbytes < _OFF_LOOP_BYTES:
                staging.put(index, slot, digest)
            else:
                await asyncio.to_thread(staging.put, index, slot, digest)
        root, authentication = manifest.parse_trailer(await self._frame(response))
        staging.confirm(root, authentication)
        return staging

    def _open(self, header: Header, authentication: bytes) -> Staging:
        if (header.job_id, header.version) != (self._job_id, self._version):
            raise IntegrityError(
                f"weights: asked for version {self._version} of {self._job_id}, "
                f"got {header.version} of {header.job_id}"
            )
        Seals(header, self._key).check_header(authentication)
        if self._staging is None:
            self._staging = self._into(header)
            if self._staging.key != self._key:
                raise StateError("weights: pull and staging were given different keys")
        elif header_to(self._staging.header) != header_to(header):
            raise IntegrityError(f"weights: two headers of version {self._version} differ")
        return self._staging

    async def _frame(self, response: Response) -> bytes:
        length = memoryview(bytearray(manifest.LENGTH.size))
        await self._bounded(response, length)
        (num_bytes,) = manifest.LENGTH.unpack(length)
        if num_bytes > manifest.MAX_FRAME_BYTES:
            raise IntegrityError(f"weights: a frame of {num_bytes} bytes")
        body = memoryview(bytearray(num_bytes))
        await self._bounded(response, body)
        return bytes(body)

    async def _bounded(self, response: Response, target: memoryview) -> None:
        try:
            async with asyncio.timeout(_STALL_S):
                await response.read_into(target)
        except TimeoutError:
            raise UnavailableError("weights: the peer has stalled") from None
