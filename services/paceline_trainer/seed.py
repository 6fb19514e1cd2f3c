"""A further node of the trainer: its uplink carries its part of what rank 0 publishes."""

from __future__ import annotations

import asyncio

from paceline.config.service import TlsSettings
from paceline.errors import IntegrityError, PacelineError
from paceline.logs import Log
from paceline.types import PolicyVersion
from paceline.weights.glance import fetch_header
from paceline.weights.server import WeightServer
from paceline_trainer.client import Ledger
from paceline_trainer.publish import Snapshot, fill

HEADER_S = 10.0
log = Log("seed")


class Seed:
    """Serves the chunks with `index % parts == part`, under the header that rank 0 has made.

    Nothing that fails here matters to the publication: rank 0 serves all chunks.
    """

    published: PolicyVersion | None = None  # only rank 0 publishes

    def __init__(
        self,
        *,
        ledger: Ledger,
        server: WeightServer,
        endpoint: str,
        part: int,
        parts: int,
        tls: TlsSettings | None = None,
    ) -> None:
        self._ledger = ledger
        self._server = server
        self._endpoint = endpoint
        self._part = part
        self._parts = parts
        self._tls = tls

    async def publish(self, snapshot: Snapshot, *, parent: int) -> None:
        """Join the publication of the step as soon as rank 0 has announced it."""
        try:
            await self._join(snapshot, parent)
        except PacelineError as error:
            log.warning("does not seed", step=snapshot.step, part=self._part, error=error)
        finally:
            snapshot.tensors.refuse()

    async def _join(self, snapshot: Snapshot, parent: int) -> None:
        made = await self._ledger.announce(
            step=snapshot.step,
            parent=parent,
            endpoint=self._endpoint,
            num_bytes=snapshot.num_bytes,
            part=self._part,
            parts=self._parts,
        )
        version = made.version.version
        header = await fetch_header(
            made.source,
            job_id=self._ledger.job_id,
            version=version,
            key=made.key,
            timeout_s=HEADER_S,
            tls=self._tls,
        )
        if header.tensors != snapshot.entries:
            raise IntegrityError(f"version {version} of rank 0 is laid out in another way")
        staging = self._server.stage(
            header, key=made.key, part=self._part, parts=self._parts, keep=made.held
        )
        await asyncio.to_thread(fill, staging, snapshot.tensors)
        log.info("seeds", version=version, part=self._part, parts=self._parts)
