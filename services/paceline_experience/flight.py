"""Episodes in flight: those on lease, and those that are being leased at this moment."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass

from paceline_experience.ledgers import Entry, Ledgers


class Flight:
    """Counts by job, never less than what Redis holds.

    Slots are promised before the ledger is asked, so that streams that are served side by side
    do not give the same room away twice. Where it is unknown what a lease has written, what was
    promised counts until the ledger has been read again.
    """

    def __init__(self, ledgers: Ledgers) -> None:
        self._ledgers = ledgers
        self._promised: Counter[str] = Counter()
        self._doubted: Counter[str] = Counter()
        self._settling = asyncio.Lock()

    def promised(self, job_id: str) -> int:
        """Beside those that the ledger counts."""
        return self._promised[job_id] + self._doubted[job_id]

    def of(self, entry: Entry) -> int:
        """Of one job, evaluations too."""
        demand = entry.ledger.demand()
        return demand.leased + demand.eval_leased + self.promised(entry.job.status.job_id)

    def by_tenant(self) -> Counter[str]:
        """Of all jobs that this process owns."""
        found: Counter[str] = Counter()
        for entry in self._ledgers.active.values():
            found[entry.job.status.tenant] += self.of(entry)
        return found

    def promise(self, job_id: str, slots: int) -> Promise:
        """Counts from here on; enter it while the ledger leases, or withdraw it."""
        self._promised[job_id] += slots
        return Promise(self, job_id, slots)

    def end(self, job_id: str, slots: int, *, known: bool) -> None:
        """A promise is over; not `known`: who knows what the ledger has leased of it."""
        self._promised[job_id] -= slots
        if not known:
            self._doubted[job_id] += slots

    async def settle(self) -> None:
        """Read again what is in doubt, and stays so where that fails.

        Raises:
            StoreError: the store does not answer.
        """
        # A doubt counts until the ledger has been read, and ends once however many streams settle.
        async with self._settling:
            for job_id, slots in [item for item in self._doubted.items() if item[1]]:
                with self._ledgers.apart("cannot be read again", job_id):
                    if entry := self._ledgers.active.get(job_id):
                        await entry.ledger.refresh()
                    self._doubted[job_id] -= slots


@dataclass(slots=True)
class Promise(AbstractContextManager["Promise"]):
    """Slots that are being leased."""

    flight: Flight
    job_id: str
    slots: int
    _over: bool = False

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._end(known=kind is None)

    def withdraw(self) -> None:
        """Nothing was leased, unless it has ended already."""
        self._end(known=True)

    def _end(self, *, known: bool) -> None:
        if not self._over:
            self._over = True
            self.flight.end(self.job_id, self.slots, known=known)
