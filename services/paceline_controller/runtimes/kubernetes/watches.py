"""Objects of one kind, listed once and kept current by a watch."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Protocol

from paceline.errors import PacelineError, UnavailableError
from paceline.platform.telemetry.logs import Log
from paceline.platform.transport.rpc import backoff_s
from paceline_controller.runtimes.kubernetes.connection import WATCH_S, HistoryGoneError
from paceline_controller.runtimes.kubernetes.resources import Kind, Object, name_of, uid_of

MAX_PAUSE_S = 30.0
MAX_GONE = 4096
# A watch that held for so long was a good one.
_GOOD_S = 5.0
log = Log("watches")


class ObjectSource(Protocol):
    """A source of objects."""

    async def list(
        self, kind: Kind, *, selector: str = "", fields: str = ""
    ) -> tuple[list[Object], str]:
        """All objects and the version of the list."""
        ...

    def watch(
        self,
        kind: Kind,
        *,
        selector: str = "",
        fields: str = "",
        version: str,
        watch_s: int = WATCH_S,
    ) -> AsyncIterator[tuple[str, Object]]:
        """Changes since a version."""
        ...


class Cache:
    """The known objects of one kind.

    Old knowledge is not given out: whoever starts and deletes by it would do so twice. What this
    process itself wrote is known at once (`learn`, `forget`); news that are older are ignored.
    """

    def __init__(
        self,
        source: ObjectSource,
        kind: Kind,
        *,
        selector: str = "",
        fields: str = "",
        on_change: Callable[[], None],
        stale_s: float = 90.0,
        watch_s: int = WATCH_S,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._source = source
        self._kind = kind
        self._selector = selector
        self._fields = fields
        self._on_change = on_change
        self._stale_s = stale_s
        self._watch_s = watch_s
        self._clock = clock
        self._chance = chance
        self._objects: dict[str, Object] = {}
        self._gone: dict[str, int] = {}  # uid -> version at which it was seen to be gone
        self._version = ""  # empty: to be listed
        self._heard_s: float | None = None

    def objects(self) -> list[Object]:
        """All known objects.

        Raises:
            UnavailableError: nothing was heard for too long, or ever.
        """
        if self._heard_s is None:
            raise UnavailableError(f"kubernetes: {self._kind.resource} are not listed yet")
        silent_s = self._clock() - self._heard_s
        if silent_s > self._stale_s:
            raise UnavailableError(
                f"kubernetes: nothing was heard of {self._kind.resource} for {silent_s:.0f} s"
            )
        return list(self._objects.values())

    def find(self, name: str) -> Object | None:
        """The object of this name; raises like `objects`."""
        return next((body for body in self.objects() if name_of(body) == name), None)

    def learn(self, body: Object) -> None:
        """The server has just answered with this object."""
        known = self._objects.get(name_of(body))
        if uid_of(body) in self._gone or (known and _version(known) > _version(body)):
            return
        self._objects[name_of(body)] = body
        self._on_change()

    def forget(self, body: Object) -> None:
        """The server has just said that this object is gone."""
        self._note_gone(body)
        known = self._objects.get(name_of(body))
        # One name has one object: an older one of this name must be gone too.
        if known and (uid_of(known) == uid_of(body) or _version(known) < _version(body)):
            self._note_gone(known)
            del self._objects[name_of(body)]
        self._on_change()

    async def run(self) -> None:
        """List, watch, and again, until cancelled."""
        attempt = 0
        while True:
            began_s = self._clock()
            try:
                await self.follow()
            except PacelineError as error:
                log.warning("lost", kind=self._kind.plural, error=error)
            attempt = 0 if self._clock() - began_s > _GOOD_S else attempt + 1
            pause_s = backoff_s(attempt, max_s=MAX_PAUSE_S, rng=self._chance)
            await asyncio.sleep(pause_s)

    async def follow(self) -> None:
        """One watch, after a list where that is needed.

        Raises:
            PacelineError: it could not be done, or broke off.
        """
        if not self._version:
            await self._list()
        changes = self._source.watch(
            self._kind,
            selector=self._selector,
            fields=self._fields,
            version=self._version,
            watch_s=self._watch_s,
        )
        try:
            async with aclosing(changes):  # pyright: ignore[reportArgumentType]
                async for change, body in changes:
                    self._heard_s = self._clock()
                    self._take(change, body)
        except HistoryGoneError:
            self._version = ""

    async def _list(self) -> None:
        items, version = await self._source.list(
            self._kind, selector=self._selector, fields=self._fields
        )
        listed = {name_of(body): body for body in items if uid_of(body) not in self._gone}
        for name, known in self._objects.items():
            if _version(known) > int(version) and name not in listed:
                listed[name] = known
        self._objects = listed
        self._gone = {uid: at for uid, at in self._gone.items() if at > int(version)}
        self._version = version
        self._heard_s = self._clock()
        self._on_change()

    def _note_gone(self, body: Object) -> None:
        self._gone[uid_of(body)] = max(_version(body), self._gone.get(uid_of(body), 0))
        if len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]

    def _take(self, change: str, body: Object) -> None:
        self._version = body["metadata"]["resourceVersion"]
        if change == "BOOKMARK":
            return
        if change == "DELETED":
            self.forget(body)
        else:
            self.learn(body)


def _version(body: Object) -> int:
    """Versions of objects grow; only those that a server gave are ever compared."""
    return int(body["metadata"].get("resourceVersion") or 0)
