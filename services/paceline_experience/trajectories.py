"""Trajectories that were trained or measured, as long as they are kept, and how far exports are."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from google.protobuf.message import DecodeError

from paceline import wire
from paceline.errors import InvalidError
from paceline.logs import Log
from paceline.types import Trajectory
from paceline.v1 import types_pb2 as pb
from paceline_experience.book import Book
from paceline_experience.core import Core
from paceline_experience.payloads import PayloadStore, unpack

_TOKEN = re.compile(r"[0-9]{1,19}(\.[0-9]{1,19})?(e\+[0-9]{1,3})?")  # an offset
_AT_ONCE = 8
_STEP = 1 << 20  # offsets of one step, as `commit.lua` gives them
log = Log("trajectories")


@dataclass(frozen=True, slots=True)
class Page:
    """Some trajectories in the order of training; `offset` is that of the last of them."""

    found: list[Trajectory]
    offset: int


@dataclass(frozen=True, slots=True)
class Export:
    """A file that is to hold what was trained between two offsets, the second included."""

    name: str
    after: int
    until: int
    count: int  # of those that were kept when it began


@dataclass(frozen=True, slots=True)
class Exported:
    """How far exports are: the offset of the last trajectory that is in a file."""

    offset: int = -1
    num_missing: int = 0  # in no file: gone or not readable when their turn came
    begun: str = ""  # a file that may be there or not
    until: int = -1
    count: int = 0  # as in `Export`


class Trajectories:
    """Lists what is kept and remembers with the job how far it has been exported.

    One that cannot be read is counted and told of, and holds up nothing.
    """

    def __init__(self, *, core: Core, payloads: PayloadStore) -> None:
        self._core = core
        self._payloads = payloads

    async def page(
        self, *, purpose: str, page_size: int, page_token: str
    ) -> tuple[list[Trajectory], str]:
        """Trained (or measured, for purpose `eval`) ones, newest first, and where to go on.

        A page ends early with the one that makes it larger than `limits.page_bytes`.

        Raises:
            InvalidError: the token is not one of ours.
        """
        keys = self._core.keys
        ring = keys.eval_ring if purpose == "eval" else keys.ring
        if page_token and not _TOKEN.fullmatch(page_token):
            raise InvalidError(f"page_token: {page_token!r} was not given by this service")
        most = f"({page_token}" if page_token else "+inf"
        found: list[bytes] = await self._core.store.command(
            "ZREVRANGEBYSCORE", ring, most, "-inf", "LIMIT", 0, page_size
        )
        names = [name.decode() for name in found]
        items, num_read = await self._bounded(names, self._core.limits.settings.page_bytes)
        if num_read == len(names) < page_size:
            return items, ""
        last = await self._core.store.command("ZSCORE", ring, names[num_read - 1])
        return items, repr(float(last)) if last is not None else ""

    async def _bounded(self, names: Sequence[str], num_bytes: int) -> tuple[list[Trajectory], int]:
        """Those that can be read of the first ones with so many bytes; how many these are."""
        items: list[Trajectory] = []
        for start in range(0, len(names), _AT_ONCE):
            kept = await self._find(names[start : start + _AT_ONCE])
            for place, (size, each) in enumerate(kept, start + 1):
                items += [each] if each is not None else []
                num_bytes -= size
                if num_bytes <= 0:
                    return items, place
        return items, len(names)

    @property
    def exported(self) -> Exported:
        """How far exports are, as of the last change."""
        return exported_of(self._core.book)

    async def begun(self) -> Export | None:
        """The export that was begun last, unless it has ended: its file may be there or not."""
        async with self._core.transaction():
            now = self.exported
            return Export(now.begun, now.offset, now.until, now.count) if now.begun else None

    async def begin(self, name: str, *, before_step: int | None) -> Export | None:
        """What was trained since the last export, in steps below `before_step`; None: nothing.

        One that was begun before and has not ended is forgotten: this one includes it.
        """
        async with self._core.transaction():
            now = await self._without_begun()
            most = "+inf" if before_step is None else f"({before_step * _STEP}"
            newest: list[bytes] = await self._core.store.command(
                "ZREVRANGEBYSCORE", self._core.keys.ring, most, f"({now.offset}", "LIMIT", 0, 1
            )
            if not newest:
                return None
            until = await self._offset(newest[0])
            count = await self._count(now.offset, until)
            await _note(self._core, Exported(now.offset, now.num_missing, name, until, count))
            return Export(name, now.offset, until, count)

    async def end(self, export: Export, *, num_written: int) -> None:
        """The file is there, with so many lines."""
        async with self._core.transaction():
            missing = self.exported.num_missing + max(0, export.count - num_written)
            await _note(self._core, Exported(export.until, missing))

    async def between(self, after: int, until: int, *, page_size: int) -> Page:
        """The first ones that were trained after an offset, up to another."""
        async with self._core.transaction():  # so that nothing is let go of meanwhile
            names: list[bytes] = await self._core.store.command(
                "ZRANGEBYSCORE", self._core.keys.ring, f"({after}", until, "LIMIT", 0, page_size
            )
            kept = await self._find([name.decode() for name in names])
            found = [each for _, each in kept if each is not None]
            offset = await self._offset(names[-1]) if names else until
        return Page(found, offset)

    async def _without_begun(self) -> Exported:
        """Of an export whose file never came, what is gone meanwhile is in no file."""
        now = self.exported
        if now.begun:
            gone = max(0, now.count - await self._count(now.offset, now.until))
            now = Exported(now.offset, now.num_missing + gone)
            await _note(self._core, now)
        return now

    async def _count(self, after: int, until: int) -> int:
        ring = self._core.keys.ring
        return int(await self._core.store.command("ZCOUNT", ring, f"({after}", until))

    async def _offset(self, name: bytes) -> int:
        return int(float(await self._core.store.command("ZSCORE", self._core.keys.ring, name)))

    async def _find(self, names: Sequence[str]) -> list[tuple[int, Trajectory | None]]:
        """Sizes in bytes, and None where one is gone or damaged."""
        read = [_unpacked(data) for data in await self._payloads.find(names)]
        missing = [name for name, (_, each) in zip(names, read, strict=True) if each is None]
        if missing:
            job, first = self._core.job_id, missing[0]
            log.warning("trajectories cannot be read", job=job, count=len(missing), first=first)
        return read


def exported_of(book: Book) -> Exported:
    """How far exports of a job are."""
    text = book.meta.get("exported", "")
    return Exported(**json.loads(text)) if text else Exported()


async def note_dropped(core: Core, names: Sequence[str]) -> None:
    """Inside a transaction: these go. Those that no export has begun with will be in no file."""
    now = exported_of(core.book)
    scores: list[bytes | None] = await core.store.command("ZMSCORE", core.keys.ring, *names)
    begun = max(now.offset, now.until)
    lost = sum(score is not None and float(score) > begun for score in scores)
    if lost:
        log.warning(
            "payloads take up too much: trajectories go unexported", job=core.job_id, count=lost
        )
        await _note(core, replace(now, num_missing=now.num_missing + lost))


async def _note(core: Core, exported: Exported) -> None:
    await core.note(exported=json.dumps(asdict(exported)))


def _unpacked(kept: bytes | None) -> tuple[int, Trajectory | None]:
    """Its bytes, and what they say; None if there are none, or they are damaged."""
    if kept is None:
        return 0, None
    try:
        data = unpack(kept)
        return len(data), wire.trajectory_from(pb.Trajectory.FromString(data))
    except (zlib.error, DecodeError, ValueError):
        return len(kept), None
