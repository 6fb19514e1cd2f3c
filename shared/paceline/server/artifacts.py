"""Small files that the experience service stores with a job, such as its tokenizer's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.digest import digest_of
from paceline.errors import IntegrityError
from paceline.transport.rpc import stream
from paceline.v1 import experience_pb2

if TYPE_CHECKING:
    from paceline.v1.experience_pb2_grpc import ExperienceAsyncStub


async def fetch(experience: ExperienceAsyncStub, digest: str, *, timeout_s: float = 30.0) -> bytes:
    """Fetch an artifact.

    Raises:
        IntegrityError: the bytes received do not match the digest.
        NotFoundError: no artifact has this digest.
        PacelineError: the experience service cannot be reached.
    """
    request = experience_pb2.GetArtifactRequest(digest=digest)
    chunks = stream(experience.GetArtifact, request, timeout_s=timeout_s)
    content = b"".join([chunk.data async for chunk in chunks])
    if digest_of(content) != digest:
        raise IntegrityError(f"artifact {digest} does not match its digest")
    return content
