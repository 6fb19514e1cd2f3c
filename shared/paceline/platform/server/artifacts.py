"""Files that the experience service stores: of a job's tokenizer, and archives of its code."""

from __future__ import annotations

import asyncio
from io import BytesIO
from typing import TYPE_CHECKING, BinaryIO

from paceline.errors import DeadlineError, IntegrityError, UnavailableError
from paceline.platform.digest import digest_of_file
from paceline.platform.transport.rpc import backoff_s, stream
from paceline.v1 import experience_pb2

if TYPE_CHECKING:
    from paceline.v1.experience_pb2_grpc import ExperienceAsyncStub

_WHOLE_S = 600.0
_ATTEMPTS = 5


async def fetch(experience: ExperienceAsyncStub, digest: str) -> bytes:
    """A small artifact; raises as `fetch_into`."""
    content = BytesIO()
    await fetch_into(experience, digest, content)
    return content.getvalue()


async def fetch_into(
    experience: ExperienceAsyncStub, digest: str, into: BinaryIO, *, chunk_s: float = 30.0
) -> None:
    """Write an artifact to a file, chunk by chunk; a stream that breaks goes on where it was.

    Raises:
        IntegrityError: the bytes received do not match the digest.
        NotFoundError: no artifact has this digest.
        PacelineError: the experience service cannot be reached, or a chunk takes `chunk_s`.
    """
    attempt = 0
    while True:
        before = into.tell()
        try:
            await _fetch_rest(experience, digest, into, chunk_s)
            break
        except (UnavailableError, DeadlineError):
            attempt = attempt + 1 if into.tell() == before else 0
            if attempt == _ATTEMPTS:
                raise
        await asyncio.sleep(backoff_s(attempt))
    if await asyncio.to_thread(digest_of_file, into) != digest:
        raise IntegrityError(f"artifact {digest} does not match its digest")


async def _fetch_rest(
    experience: ExperienceAsyncStub, digest: str, into: BinaryIO, chunk_s: float
) -> None:
    request = experience_pb2.GetArtifactRequest(digest=digest, offset=into.tell())
    chunks = stream(experience.GetArtifact, request, timeout_s=_WHOLE_S)
    while True:
        try:
            async with asyncio.timeout(chunk_s):
                chunk = await anext(chunks, None)
        except TimeoutError:
            text = f"artifact {digest}: nothing arrived for {chunk_s:g} s"
            raise DeadlineError(text) from None
        if chunk is None:
            return
        into.write(chunk.data)
