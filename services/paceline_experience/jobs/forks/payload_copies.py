"""Copies trajectories from one job to another, whose groups have its own id in their names."""

from __future__ import annotations

import re
from collections.abc import Collection

from paceline.v1 import types_pb2 as pb
from paceline_experience.store.payloads import RedisPayloads, pack, unpack
from paceline_experience.store.store import Store

_CHUNK = 256


class Renaming:
    """Replaces the job in names of groups, in keys as well as in JSON."""

    def __init__(self, parent_id: str, child_id: str) -> None:
        self._pattern = re.compile(rb"(?<![A-Za-z0-9-])" + re.escape(parent_id.encode()) + rb"\.")
        self._child = child_id.encode() + b"."

    def __call__(self, text: bytes) -> bytes:
        """The same text about the other job."""
        return self._pattern.sub(self._child, text)


class PayloadCopier:
    """Copies what is wanted and not copied yet, so that a newer list costs only what is new."""

    def __init__(
        self,
        store: Store,
        *,
        source: str,
        target: str,
        rename: Renaming,
        compress_over_bytes: int,
    ) -> None:
        self._source = RedisPayloads(store, source)
        self._target = RedisPayloads(store, target)
        self.rename = rename
        self._compress_over = compress_over_bytes
        self._copied = set[str]()

    async def copy(self, names: Collection[str]) -> set[str]:
        """Copy payloads of these names, and remove all others; returns the names.

        Raises:
            IntegrityError: one is not there any more; those before it stay copied.
        """
        wanted = set(names)
        missing = sorted(wanted - self._copied)
        for start in range(0, len(missing), _CHUNK):
            chunk = missing[start : start + _CHUNK]
            blobs = await self._source.get(chunk)
            copies = [self._renamed(blob) for blob in blobs]
            await self._target.put(dict(zip(map(self._name, chunk), copies, strict=True)))
            self._copied |= {*chunk}
        await self._target.drop([self._name(name) for name in sorted(self._copied - wanted)])
        self._copied = wanted
        return wanted

    def _name(self, name: str) -> str:
        return self.rename(name.encode()).decode()

    def _renamed(self, payload: bytes) -> bytes:
        trajectory = pb.Trajectory.FromString(unpack(payload))
        trajectory.group_id = self._name(trajectory.group_id)
        return pack(trajectory.SerializeToString(), self._compress_over)
