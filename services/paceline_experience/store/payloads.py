"""Storage for the bytes of trajectories: packed messages, compressed above a size."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from paceline.errors import IntegrityError

if TYPE_CHECKING:
    from paceline_experience.store.store import Store

_RAW, _ZLIB = b"\0", b"\1"
_PAGE = 512


def pack(data: bytes, compress_over_bytes: int) -> bytes:
    """Encode for the store: one byte for the encoding, then the message."""
    if len(data) <= compress_over_bytes:
        return _RAW + data
    return _ZLIB + zlib.compress(data, 1)


def unpack(payload: bytes) -> bytes:
    """Decode what `pack` has made."""
    return zlib.decompress(payload[1:]) if payload[:1] == _ZLIB else payload[1:]


class PayloadStore(Protocol):
    """Stores packed payloads of one job by name."""

    async def put(self, items: Mapping[str, bytes]) -> None:
        """Store these; the first content of a name stays."""
        ...

    async def get(self, names: Sequence[str]) -> list[bytes]:
        """Their contents in order; raises `IntegrityError` if one is gone."""
        ...

    async def find(self, names: Sequence[str]) -> list[bytes | None]:
        """Their contents in order; None where one is gone."""
        ...

    async def drop(self, names: Sequence[str]) -> None:
        """Delete these; unknown names are ignored."""
        ...

    async def sizes(self) -> dict[str, int]:
        """Sizes in bytes by name, of everything stored."""
        ...


class RedisPayloads:
    """All payloads of a job in one hash."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key

    async def put(self, items: Mapping[str, bytes]) -> None:
        """One HSET: an attempt is submitted with one content only."""
        if items:
            flat = [part for item in items.items() for part in item]
            await self._store.command("HSET", self._key, *flat)

    async def get(self, names: Sequence[str]) -> list[bytes]:
        """As `find`, but raises `IntegrityError` if one is gone."""
        found = await self.find(names)
        whole = [data for data in found if data is not None]
        if len(whole) < len(names):
            lost = [name for name, data in zip(names, found, strict=True) if data is None]
            raise IntegrityError(f"{len(lost)} payloads are gone from the store, first {lost[0]}")
        return whole

    async def find(self, names: Sequence[str]) -> list[bytes | None]:
        """One HMGET; None where a payload is gone."""
        return await self._store.command("HMGET", self._key, *names) if names else []

    async def drop(self, names: Sequence[str]) -> None:
        """HDEL by pages."""
        for start in range(0, len(names), _PAGE):
            await self._store.command("HDEL", self._key, *names[start : start + _PAGE])

    async def sizes(self) -> dict[str, int]:
        """HKEYS, then HSTRLEN of each."""
        found = dict[str, int]()
        names: list[bytes] = await self._store.command("HKEYS", self._key)
        for start in range(0, len(names), _PAGE):
            page = names[start : start + _PAGE]
            with self._store.waiting():
                async with self._store.redis.pipeline(transaction=False) as pipe:
                    for name in page:
                        pipe.execute_command("HSTRLEN", self._key, name)
                    lengths = await pipe.execute()
            found.update(zip((n.decode() for n in page), lengths, strict=True))
        return found
