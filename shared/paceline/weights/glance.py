"""The header of a version alone, for who makes the bytes itself."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

from paceline.config.service import TlsSettings
from paceline.errors import IntegrityError, NotFoundError, UnavailableError
from paceline.weights.frames import Request, request_body
from paceline.weights.inlet import Inlet
from paceline.weights.manifest import Header
from paceline.weights.pace import Pace
from paceline.weights.seals import Seals, pull_token
from paceline.weights.stream import post, secure

_NOTHING = b"\0"  # a bitmap without a chunk
_PAUSE_S = 0.1


async def fetch_header(
    endpoint: str,
    *,
    job_id: str,
    version: int,
    key: bytes,
    timeout_s: float,
    tls: TlsSettings | None = None,
) -> Header:
    """Ask one server, and again until it has the version.

    Raises:
        IntegrityError: it is not sealed with the key, or of another version.
        UnavailableError: it did not come within `timeout_s`.
    """
    path = f"/weights/{quote(job_id, safe='')}/{version}"
    body, token, peer = request_body(Request(_NOTHING)), pull_token(key), secure(tls)
    clock = asyncio.get_running_loop().time
    inlet = Inlet(clock=clock, pace=Pace(0.0, clock=clock))
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    response = await post(endpoint, path, body, token=token, peer=peer)
                    break
                except (NotFoundError, UnavailableError):
                    await asyncio.sleep(_PAUSE_S)
            frame = await inlet.open(response)
    except TimeoutError:
        raise UnavailableError(
            f"weights: {endpoint} did not tell what version {version} is within {timeout_s:g} s"
        ) from None
    finally:
        inlet.close()
    Seals(frame.header, key).check_header(frame.authentication)
    if (frame.header.job_id, frame.header.version) != (job_id, version):
        raise IntegrityError(f"weights: {endpoint} gave the header of another version")
    return frame.header
