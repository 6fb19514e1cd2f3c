"""Fetches only the header of a version, for a receiver that produces the bytes itself."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

from paceline.config.service import TlsSettings
from paceline.errors import IntegrityError, NotFoundError, UnavailableError
from paceline.weights.snapshot.manifest import SnapshotHeader
from paceline.weights.snapshot.verification import SnapshotAuthenticator, pull_token
from paceline.weights.stream.chunk_reader import ChunkReader
from paceline.weights.stream.frames import ChunkRequest, request_body
from paceline.weights.stream.http import peer_tls, post
from paceline.weights.stream.rate_limit import RateLimit

_NO_CHUNKS = b"\0"  # a bitmap that selects no chunk
_RETRY_S = 0.1


async def fetch_header(
    endpoint: str,
    *,
    job_id: str,
    version: int,
    key: bytes,
    timeout_s: float,
    tls: TlsSettings | None = None,
) -> SnapshotHeader:
    """Ask one server, and retry until it has the version.

    Raises:
        IntegrityError: the header is not authenticated with the key, or belongs to another version.
        UnavailableError: no header arrived within `timeout_s`.
    """
    path = f"/weights/{quote(job_id, safe='')}/{version}"
    body, token, peer = request_body(ChunkRequest(_NO_CHUNKS)), pull_token(key), peer_tls(tls)
    clock = asyncio.get_running_loop().time
    reader = ChunkReader(clock=clock, pace=RateLimit(0.0, clock=clock))
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    response = await post(endpoint, path, body, token=token, peer=peer)
                    break
                except (NotFoundError, UnavailableError):
                    await asyncio.sleep(_RETRY_S)
            frame = await reader.open(response)
    except TimeoutError:
        raise UnavailableError(
            f"weights: {endpoint} sent no header of version {version} within {timeout_s:g} s"
        ) from None
    finally:
        reader.close()
    SnapshotAuthenticator(frame.header, key).check_header(frame.authentication)
    if (frame.header.job_id, frame.header.version) != (job_id, version):
        raise IntegrityError(f"weights: {endpoint} sent the header of another version")
    return frame.header
