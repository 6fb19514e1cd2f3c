"""Receives archives of code piece by piece; only what is whole and can be unpacked is stored."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from paceline.errors import ConfigError, DeadlineError, InvalidError, NotFoundError
from paceline.isolation.code.archive import check
from paceline.platform.fair_queue import FairQueue, QueueOwner
from paceline_experience.store.artifacts import ArtifactStore
from paceline_experience.tenancy.quotas import Quotas

UPLOAD_S = 900.0
_AT_A_TIME, _OF_TENANT = 6, 2


@dataclass(frozen=True, slots=True)
class CodePiece:
    """A piece of an archive; the first may say what the whole is to be."""

    data: bytes
    digest: str = ""
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class UploadedCode:
    """An archive that is stored."""

    digest: str
    names: list[str]


class Uploads:
    """Spools each upload in a file without a name, which nothing outlives."""

    def __init__(self, *, artifacts: ArtifactStore, quotas: Quotas) -> None:
        self._artifacts = artifacts
        self._quotas = quotas
        self._slots = FairQueue(_AT_A_TIME, most_of_tenant=_OF_TENANT)

    async def receive(
        self,
        tenant: str,
        pieces: AsyncIterator[CodePiece],
        *,
        num_bytes: int = 0,
        accept: Callable[[], Awaitable[None]],
    ) -> UploadedCode:
        """Store code for jobs of a tenant.

        `num_bytes` of the whole, if known; `accept` is called before anything is read.

        Raises:
            LimitError: it is too large, or the tenant has uploaded too much within a week.
            InvalidError: it cannot be unpacked, or has not the size or digest that was announced.
            DeadlineError: it has not arrived within `UPLOAD_S`.
        """
        try:
            async with asyncio.timeout(UPLOAD_S), self._slots.slot(QueueOwner(tenant)):
                self._quotas.check(tenant, "code_bytes", num_bytes)
                await accept()
                try:
                    return await self._receive(tenant, pieces)
                except InvalidError:
                    # An answer that meets a message on its way may be lost.
                    async for _ in pieces:
                        pass
                    raise
        except TimeoutError:
            raise DeadlineError(f"code: was not sent within {UPLOAD_S:g} s") from None

    async def names_of(self, tenant: str, field: str, digest: str) -> list[str]:
        """The names in an upload that a section of a job names by its digest.

        Raises:
            ConfigError: the tenant has no such upload.
        """
        try:
            return await self._artifacts.names_of(tenant, digest)
        except NotFoundError:
            raise ConfigError(
                f"{field}.digest: tenant {tenant!r} has not uploaded {digest}, or "
                "none of its jobs has used it for a week; upload it with POST /v1/code"
            ) from None

    async def _receive(self, tenant: str, pieces: AsyncIterator[CodePiece]) -> UploadedCode:
        announced = CodePiece(b"")
        size, sha256 = 0, hashlib.sha256()
        with tempfile.TemporaryFile() as archive:
            async for piece in pieces:
                if not size and (piece.digest or piece.num_bytes):
                    announced = piece
                    self._quotas.check(tenant, "code_bytes", announced.num_bytes)
                size += len(piece.data)
                self._quotas.check(tenant, "code_bytes", size)
                if announced.num_bytes and size > announced.num_bytes:
                    raise _other_size(size, announced.num_bytes)
                sha256.update(piece.data)
                await asyncio.to_thread(archive.write, piece.data)
            if announced.num_bytes and size != announced.num_bytes:
                raise _other_size(size, announced.num_bytes)
            digest = sha256.hexdigest()
            if announced.digest and announced.digest != digest:
                raise InvalidError(
                    f"code: arrived with the digest {digest}, not {announced.digest}; send it again"
                )
            names = await asyncio.to_thread(check, archive)
            before = await self._artifacts.uploaded(tenant, digest)
            self._quotas.check(tenant, "uploaded_bytes", before + size)
            await self._artifacts.put_code(tenant, digest, archive, names)
        return UploadedCode(digest, names)


def _other_size(found: int, announced: int) -> InvalidError:
    return InvalidError(f"code: {found} bytes were sent, and {announced} announced")
