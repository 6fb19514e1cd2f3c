"""Digests of a snapshot under the key of its job, and the token that goes with the key."""

from __future__ import annotations

import hmac

from blake3 import blake3

from paceline.errors import IntegrityError
from paceline.weights.manifest import Header, header_to

DIGEST_BYTES = 32


class Seals:
    """Digests of one snapshot; without a key they detect damage only.

    The key of chunks and trailer is derived from the header and a chunk's digest covers its index,
    so that nothing of another snapshot, and no chunk in another's place, is accepted.
    """

    def __init__(self, header: Header, key: bytes) -> None:
        body = header_to(header).SerializeToString(deterministic=True)
        secret = blake3(key, derive_key_context="paceline weights v2 header").digest()
        self.header_auth = blake3(body, key=secret).digest()
        self._authentic = bool(key)
        context = "paceline weights v2 chunks"
        self._key = blake3(secret + self.header_auth, derive_key_context=context).digest()

    def digest(self, data: bytes | memoryview, index: int) -> bytes:
        """Digest of a chunk, from its decoded bytes."""
        hasher = blake3(data, key=self._key)
        hasher.update(index.to_bytes(8, "little"))
        return hasher.digest()

    def root(self, digests: bytes) -> bytes:
        """Digest of the digests of all chunks, in order."""
        return blake3(digests, key=self._key).digest()

    def trailer_auth(self, root: bytes) -> bytes:
        """Authentication of the trailer."""
        return blake3(b"trailer" + root, key=self._key).digest()

    def check_header(self, authentication: bytes) -> None:
        """Raise `IntegrityError` unless the header was sealed with this key."""
        if not hmac.compare_digest(authentication, self.header_auth):
            raise IntegrityError(
                "weights: the header was not sealed with this job's key"
                if self._authentic
                else "weights: the header differs from its digest"
            )

    def check_trailer(self, root: bytes, authentication: bytes) -> None:
        """Raise `IntegrityError` unless the root was sealed with this key."""
        if not hmac.compare_digest(authentication, self.trailer_auth(root)):
            raise IntegrityError("weights: the root was not sealed with this snapshot's key")


def pull_token(key: bytes) -> str:
    """What a peer shows to pull snapshots of the job that has this key; tells nothing of it."""
    return blake3(key, derive_key_context="paceline weights v2 pull").hexdigest()
