"""Task ids, digests of content, stable hashes, and keyed permutations for splits and orders."""

from __future__ import annotations

import hashlib
from typing import BinaryIO


def digest_of(content: bytes) -> str:
    """The hexadecimal SHA-256 that identifies an artifact, or the code of a job."""
    return hashlib.sha256(content).hexdigest()


def digest_of_file(file: BinaryIO) -> str:
    """As `digest_of`, of a whole file."""
    file.seek(0)
    found = hashlib.sha256()
    while part := file.read(1 << 20):
        found.update(part)
    return found.hexdigest()


def task_id(environment: str, payload: str, seed: int) -> str:
    """The content digest that identifies a task."""
    content = f"{environment}\0{seed}\0{payload}".encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def number(*parts: object) -> int:
    """A 64-bit hash of all parts, the same in every process."""
    content = "\0".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


class Permutation:
    """A bijection of `range(size)` chosen by a key; needs no memory.

    A balanced Feistel network over the next even power of two, walked until it lands inside.
    """

    def __init__(self, size: int, key: object, *, rounds: int = 4) -> None:
        self._size = size
        self._half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half) - 1
        self._keys = [number(key, turn).to_bytes(8, "little") for turn in range(rounds)]

    def __call__(self, index: int) -> int:
        """The image of `index`."""
        if not 0 <= index < self._size:
            raise IndexError(index)
        value = self._shuffle(index)
        while value >= self._size:
            value = self._shuffle(value)
        return value

    def _shuffle(self, value: int) -> int:
        left, right = value >> self._half, value & self._mask
        for key in self._keys:
            digest = hashlib.blake2b(right.to_bytes(8, "little"), digest_size=8, key=key).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & self._mask)
        return left << self._half | right
