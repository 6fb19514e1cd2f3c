"""Weights over HTTP between peers: each worker relays what it has verified."""

from __future__ import annotations

from collections.abc import Callable

from paceline.weights.route import TransferProgress, TransferReport
from paceline.weights.snapshot.manifest import SnapshotHeader
from paceline.weights.snapshot.staging import Staging
from paceline.weights.stream.fetch_header import fetch_header
from paceline.weights.transfer.server import WeightServer
from paceline.weights.transfer.version_receiver import Receiver, Shortcut
from paceline.weights.transport import TransportSettings


class HttpTransport:
    """A `WeightTransport` that needs nothing but a network."""

    def __init__(self, settings: TransportSettings) -> None:
        self._settings = settings
        self.server = WeightServer(
            host=settings.host,
            port=settings.port,
            advertise_host=settings.advertise_host,
            metrics=settings.metrics,
            tls=settings.tls,
            bytes_per_s=settings.bytes_per_s,
            keep_streaming=settings.keep_streaming,
            clock=settings.clock,
        )

    async def start(self) -> str:
        """Bind the port; returns the endpoint for peers."""
        return await self.server.start()

    def publish(
        self,
        header: SnapshotHeader,
        *,
        key: bytes = b"",
        part: int = 0,
        parts: int = 1,
        keep: int = -1,
    ) -> Staging:
        """Memory to fill with a version, which is served meanwhile."""
        return self.server.stage(header, key=key, part=part, parts=parts, keep=keep)

    def offer(self, staging: Staging, *, keep: int = -1) -> None:
        """Serve a snapshot at hand."""
        self.server.offer(staging, keep=keep)

    def receive(
        self,
        *,
        job_id: str,
        worker_id: str,
        report: Callable[[TransferReport], None],
        complete: Callable[[Staging], None],
        keep: Callable[[], int] = lambda: -1,
    ) -> Receiver:
        """Pulls from the peers of its routes."""
        shortcut = self._shortcut(job_id, worker_id, report)
        return Receiver(
            job_id=job_id,
            worker_id=worker_id,
            server=self.server,
            report=report,
            complete=complete,
            keep=keep,
            metrics=self._settings.metrics,
            tls=self._settings.tls,
            bytes_per_s=self._settings.bytes_per_s,
            shortcut=shortcut,
        )

    async def header(
        self, endpoint: str, *, job_id: str, version: int, key: bytes, timeout_s: float
    ) -> SnapshotHeader:
        """The header of a version, as the server at `endpoint` sends it."""
        return await fetch_header(
            endpoint,
            job_id=job_id,
            version=version,
            key=key,
            timeout_s=timeout_s,
            tls=self._settings.tls,
        )

    def verify(self, staging: Staging) -> None:
        """Compare the bytes of a complete snapshot with their digests."""
        staging.verify_all()

    def reuse(self, buffers: int) -> None:
        """Keep the memory of so many snapshots for later ones."""
        self.server.reuse(buffers)

    def progress(self) -> list[TransferProgress]:
        """Progress of each version held."""
        return self.server.progress()

    async def close(self) -> None:
        """Stop serving; open streams are aborted."""
        await self.server.close()

    def _shortcut(
        self, job_id: str, worker_id: str, report: Callable[[TransferReport], None]
    ) -> Shortcut | None:
        """What a receiver tries before HTTP."""
        return None
