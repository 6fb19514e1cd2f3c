"""Places that are taken in turns: tenants first, then the jobs of a tenant."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple


class Owner(NamedTuple):
    """Who wants a place."""

    tenant: str = ""
    job_id: str = ""


NOBODY = Owner()


@dataclass(slots=True)
class _Account:
    """How many places somebody has, and when it got the last one."""

    has: Counter[str] = field(default_factory=Counter[str])
    last: dict[str, int] = field(default_factory=dict[str, int])

    def rank(self, name: str) -> tuple[int, int]:
        return self.has[name], self.last.get(name, -1)


class Turns:
    """A place that becomes free goes to whoever has fewest; of equals, to who waited longest.

    A tenant or job with a long queue has its place in every turn, and no more.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: dict[Owner, deque[asyncio.Future[None]]] = {}
        self._tenants = _Account()
        self._jobs = _Account()
        self._turn = 0

    @asynccontextmanager
    async def place(self, owner: Owner) -> AsyncGenerator[None]:
        """Hold a place."""
        await self._enter(owner)
        try:
            yield
        finally:
            self._leave(owner)

    async def _enter(self, owner: Owner) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(owner)  # it was given a place that it does not want any more
            raise

    def _hand_out(self) -> None:
        while self._free and (owner := self._next()) is not None:
            turns = self._waiting[owner]
            turn = turns.popleft()
            if not turns:
                del self._waiting[owner]
            if not turn.done():
                self._free -= 1
                self._turn += 1
                for account, name in self._accounts(owner):
                    account.has[name] += 1
                    account.last[name] = self._turn
                turn.set_result(None)

    def _next(self) -> Owner | None:
        return min(self._waiting, key=self._rank, default=None)

    def _rank(self, owner: Owner) -> tuple[int, int, int, int]:
        return (*self._tenants.rank(owner.tenant), *self._jobs.rank(owner.job_id))

    def _leave(self, owner: Owner) -> None:
        self._free += 1
        for account, name in self._accounts(owner):
            account.has[name] -= 1
            if not account.has[name]:
                del account.has[name]
        self._hand_out()
        if not self._waiting:
            self._forget()

    def _forget(self) -> None:
        """Nobody waits: who came when is of no use any more."""
        for account in (self._tenants, self._jobs):
            account.last.clear()

    def _accounts(self, owner: Owner) -> tuple[tuple[_Account, str], tuple[_Account, str]]:
        return (self._tenants, owner.tenant), (self._jobs, owner.job_id)
