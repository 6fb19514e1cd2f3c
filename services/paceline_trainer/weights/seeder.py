"""Serves a part of a version from each further node of the trainer, to use their uplinks too."""

from __future__ import annotations

import asyncio

from paceline.errors import IntegrityError, PacelineError
from paceline.platform.telemetry.logs import Log
from paceline.types import PolicyVersion
from paceline.weights.transport import WeightTransport
from paceline_trainer.client import TrainerLedger
from paceline_trainer.weights.publish import WeightCopy, fill

HEADER_TIMEOUT_S = 10.0
log = Log("seed")


class WeightSeeder:
    """Serves the chunks with `index % parts == part`, under the header of rank 0.

    A failure does not affect the publication, as rank 0 serves all chunks.
    """

    published: PolicyVersion | None = None  # only rank 0 publishes

    def __init__(
        self,
        *,
        ledger: TrainerLedger,
        transport: WeightTransport,
        endpoint: str,
        part: int,
        parts: int,
    ) -> None:
        self._ledger = ledger
        self._transport = transport
        self._endpoint = endpoint
        self._part = part
        self._parts = parts

    async def publish(self, snapshot: WeightCopy, *, parent: int) -> None:
        """Join the publication of the step as soon as rank 0 has announced it."""
        try:
            await self._join(snapshot, parent)
        except PacelineError as error:
            log.warning("not seeding", step=snapshot.step, part=self._part, error=error)
        finally:
            snapshot.tensors.close()

    async def _join(self, snapshot: WeightCopy, parent: int) -> None:
        numbered = await self._ledger.publish_version(
            step=snapshot.step,
            parent=parent,
            endpoint=self._endpoint,
            num_bytes=snapshot.num_bytes,
            part=self._part,
            parts=self._parts,
        )
        version = numbered.version.version
        header = await self._transport.header(
            numbered.source,
            job_id=self._ledger.job_id,
            version=version,
            key=numbered.key,
            timeout_s=HEADER_TIMEOUT_S,
        )
        if header.tensors != snapshot.entries:
            raise IntegrityError(f"version {version} of rank 0 has another layout")
        staging = self._transport.publish(
            header, key=numbered.key, part=self._part, parts=self._parts, keep=numbered.held
        )
        await asyncio.to_thread(fill, staging, snapshot.tensors)
        log.info("seeding", version=version, part=self._part, parts=self._parts)
