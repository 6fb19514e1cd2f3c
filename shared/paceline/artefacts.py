"""Small files that experience keeps with a job, such as those of its tokenizer."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from paceline.errors import IntegrityError
from paceline.rpc import stream
from paceline.v1 import experience_pb2

if TYPE_CHECKING:
    from paceline.v1.experience_pb2_grpc import ExperienceAsyncStub


def digest_of(content: bytes) -> str:
    """The SHA-256 by which an artefact is named, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


async def fetch(experience: ExperienceAsyncStub, digest: str, *, timeout_s: float = 30.0) -> bytes:
    """The content.

    Raises:
        IntegrityError: other bytes came than those the digest is of.
        NotFoundError: there is none of this digest.
        PacelineError: experience cannot be reached.
    """
    request = experience_pb2.GetArtefactRequest(digest=digest)
    chunks = stream(experience.GetArtefact, request, timeout_s=timeout_s)
    content = b"".join([chunk.data async for chunk in chunks])
    if digest_of(content) != digest:
        raise IntegrityError(f"artefact {digest} came with other bytes")
    return content
