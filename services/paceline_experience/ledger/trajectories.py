"""Stored trajectories that were trained or measured, and the progress of exports."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from paceline.errors import InvalidError
from paceline.platform import wire
from paceline.platform.telemetry.logs import Log
from paceline.types import Trajectory
from paceline.v1 import types_pb2 as pb
from paceline_experience.ledger.context import LedgerContext
from paceline_experience.ledger.records import Exported
from paceline_experience.store.payloads import PayloadStore, unpack

_TOKEN = re.compile(r"[0-9]{1,19}(\.[0-9]{1,19})?(e\+[0-9]{1,3})?")  # an offset
_FETCH_SIZE = 8
Read = TypeVar("Read")
_STEP = 1 << 20  # offsets per step, as `commit.lua` assigns them
log = Log("trajectories")


@dataclass(frozen=True, slots=True)
class TrajectoryListPage:
    """Trajectories in the order of training, as dicts; `offset` is that of the last one."""

    found: list[dict[str, Any]]
    offset: int


@dataclass(frozen=True, slots=True)
class ExportRange:
    """A file for what was trained after one offset, up to and including another."""

    name: str
    after: int
    until: int
    count: int  # trajectories in that range when the export began


class Trajectories:
    """Lists stored trajectories and records in the ledger how far they have been exported.

    A trajectory that cannot be read is counted and logged, and blocks nothing.
    """

    def __init__(self, *, core: LedgerContext, payloads: PayloadStore) -> None:
        self._core = core
        self._payloads = payloads

    async def page(
        self, *, purpose: str, page_size: int, page_token: str
    ) -> tuple[list[Trajectory], str]:
        """Trained trajectories (purpose `eval`: measured ones), newest first, and the next token.

        A page ends early with the trajectory that takes it over `limits.page_bytes`.

        Raises:
            InvalidError: the token was not issued by this service.
        """
        keys = self._core.keys
        ring = keys.eval_ring if purpose == "eval" else keys.ring
        if page_token and not _TOKEN.fullmatch(page_token):
            raise InvalidError(f"page_token: {page_token!r} was not given by this service")
        max_score = f"({page_token}" if page_token else "+inf"
        found: list[bytes] = await self._core.store.command(
            "ZREVRANGEBYSCORE", ring, max_score, "-inf", "LIMIT", 0, page_size
        )
        names = [name.decode() for name in found]
        items, num_read = await self._read_bounded(names, self._core.limits.settings.page_bytes)
        if num_read == len(names) < page_size:
            return items, ""
        last = await self._core.store.command("ZSCORE", ring, names[num_read - 1])
        return items, repr(float(last)) if last is not None else ""

    async def _read_bounded(
        self, names: Sequence[str], max_bytes: int
    ) -> tuple[list[Trajectory], int]:
        """Read until `max_bytes` are reached; returns the readable ones and how many were read."""
        num_bytes = 0
        items: list[Trajectory] = []
        for start in range(0, len(names), _FETCH_SIZE):
            fetched = await self._find(names[start : start + _FETCH_SIZE], _as_trajectory)
            for num_read, (size, each) in enumerate(fetched, start + 1):
                items += [each] if each is not None else []
                num_bytes += size
                if num_bytes >= max_bytes:
                    return items, num_read
        return items, len(names)

    @property
    def exported(self) -> Exported:
        """Progress of exports, as of the last change."""
        return self._core.state.meta.exported

    async def unfinished(self) -> ExportRange | None:
        """An export that was begun and not ended; its file may or may not exist."""
        async with self._core.transaction():
            now = self.exported
            return ExportRange(now.begun, now.offset, now.until, now.count) if now.begun else None

    async def begin(self, name: str, *, before_step: int | None) -> ExportRange | None:
        """Begin to export what was trained since the last export; None: nothing was.

        Only steps below `before_step`. An unfinished export is discarded: this one includes it.
        """
        async with self._core.transaction():
            now = await self._discard_unfinished()
            max_score = "+inf" if before_step is None else f"({before_step * _STEP}"
            newest: list[bytes] = await self._core.store.command(
                "ZREVRANGEBYSCORE", self._core.keys.ring, max_score, f"({now.offset}", "LIMIT", 0, 1
            )
            if not newest:
                return None
            until = await self._offset(newest[0])
            count = await self._count(now.offset, until)
            await self._core.note(exported=replace(now, begun=name, until=until, count=count))
            return ExportRange(name, now.offset, until, count)

    async def end(self, export: ExportRange, *, num_written: int) -> None:
        """The file was written, with this number of lines."""
        async with self._core.transaction():
            missing = self.exported.num_missing + max(0, export.count - num_written)
            await self._core.note(exported=Exported(export.until, missing, newest=export.name))

    async def between(self, after: int, until: int, *, page_size: int) -> TrajectoryListPage:
        """The first page of what was trained after one offset, up to and including another."""
        async with self._core.transaction():  # so that nothing is deleted meanwhile
            names: list[bytes] = await self._core.store.command(
                "ZRANGEBYSCORE", self._core.keys.ring, f"({after}", until, "LIMIT", 0, page_size
            )
            fetched = await self._find([name.decode() for name in names], _as_fields)
            found = [each for _, each in fetched if each is not None]
            offset = await self._offset(names[-1]) if names else until
        return TrajectoryListPage(found, offset)

    async def _discard_unfinished(self) -> Exported:
        """What was deleted since an unfinished export began counts as missing."""
        now = self.exported
        if now.begun:
            gone = max(0, now.count - await self._count(now.offset, now.until))
            now = Exported(now.offset, now.num_missing + gone, newest=now.newest)
            await self._core.note(exported=now)
        return now

    async def _count(self, after: int, until: int) -> int:
        ring = self._core.keys.ring
        return int(await self._core.store.command("ZCOUNT", ring, f"({after}", until))

    async def _offset(self, name: bytes) -> int:
        return int(float(await self._core.store.command("ZSCORE", self._core.keys.ring, name)))

    async def _find(
        self, names: Sequence[str], read_as: Callable[[pb.Trajectory], Read]
    ) -> list[tuple[int, Read | None]]:
        """Sizes in bytes and trajectories; None where one is gone or damaged."""
        read = [_unpacked(data, read_as) for data in await self._payloads.find(names)]
        missing = [name for name, (_, each) in zip(names, read, strict=True) if each is None]
        if missing:
            job, first = self._core.job_id, missing[0]
            log.warning("trajectories cannot be read", job=job, count=len(missing), first=first)
        return read


async def note_dropped(core: LedgerContext, names: Sequence[str]) -> None:
    """Inside a transaction: these will be deleted; count those that no export has reached yet."""
    now = core.state.meta.exported
    scores: list[bytes | None] = await core.store.command("ZMSCORE", core.keys.ring, *names)
    begun = max(now.offset, now.until)
    lost = sum(score is not None and float(score) > begun for score in scores)
    if lost:
        log.warning(
            "payloads take up too much: trajectories are not exported", job=core.job_id, count=lost
        )
        await core.note(exported=replace(now, num_missing=now.num_missing + lost))


def step_of(score: float) -> int:
    """The step whose batch contains a trained trajectory, from its place in the ring."""
    return int(score) // _STEP


def _as_trajectory(message: pb.Trajectory) -> Trajectory:
    return wire.from_proto(message, Trajectory)


def _as_fields(message: pb.Trajectory) -> dict[str, Any]:
    return wire.to_fields(message, Trajectory)


def _unpacked(
    payload: bytes | None, read_as: Callable[[pb.Trajectory], Read]
) -> tuple[int, Read | None]:
    """Size in bytes, and the trajectory; None if it is gone or damaged."""
    if payload is None:
        return 0, None
    try:
        data = unpack(payload)
        return len(data), read_as(pb.Trajectory.FromString(data))
    except (zlib.error, DecodeError, ValueError):
        return len(payload), None
