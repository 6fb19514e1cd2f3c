"""Verifies header, chunks and trailer of a snapshot against digests keyed with its job's key."""

from __future__ import annotations

import hmac

from blake3 import blake3

from paceline.errors import IntegrityError
from paceline.weights.snapshot.manifest import SnapshotHeader, header_to_proto

DIGEST_BYTES = 32


class SnapshotAuthenticator:
    """Computes and checks the digests of one snapshot; without a key they detect only damage.

    The key of chunks and trailer is derived from the header, and the digest of a chunk covers its
    index: parts of another snapshot, and chunks at the wrong index, are rejected.
    """

    def __init__(self, header: SnapshotHeader, key: bytes) -> None:
        body = header_to_proto(header).SerializeToString(deterministic=True)
        secret = blake3(key, derive_key_context="paceline weights v2 header").digest()
        self.header_auth = blake3(body, key=secret).digest()
        self._version = header.version
        self._keyed = bool(key)
        context = "paceline weights v2 chunks"
        self._key = blake3(secret + self.header_auth, derive_key_context=context).digest()

    def digest(self, data: bytes | memoryview, index: int) -> bytes:
        """Digest of a decoded chunk."""
        hasher = blake3(data, key=self._key)
        hasher.update(index.to_bytes(8, "little"))
        return hasher.digest()

    def root(self, digests: bytes) -> bytes:
        """Digest of the digests of all chunks, in order."""
        return blake3(digests, key=self._key).digest()

    def trailer_auth(self, root: bytes) -> bytes:
        """Authentication tag of the trailer."""
        return blake3(b"trailer" + root, key=self._key).digest()

    def check_header(self, authentication: bytes) -> None:
        """Raise `IntegrityError` unless the header was authenticated with this key."""
        if not hmac.compare_digest(authentication, self.header_auth):
            raise IntegrityError(
                "weights: the header was not authenticated with this job's key"
                if self._keyed
                else "weights: the header differs from its digest"
            )

    def check_chunk(self, data: memoryview, index: int, digest: bytes) -> None:
        """Raise `IntegrityError` unless a decoded chunk has this digest."""
        if not hmac.compare_digest(self.digest(data, index), digest):
            raise IntegrityError(
                f"weights: chunk {index} of version {self._version} differs from its digest"
            )

    def check_trailer(self, root: bytes, authentication: bytes) -> None:
        """Raise `IntegrityError` unless the root was authenticated with this key."""
        if not hmac.compare_digest(authentication, self.trailer_auth(root)):
            raise IntegrityError("weights: the root was not authenticated with this snapshot's key")


def pull_token(key: bytes) -> str:
    """The bearer token for pulling snapshots of a job, derived one-way from the job's key."""
    return blake3(key, derive_key_context="paceline weights v2 pull").hexdigest()
