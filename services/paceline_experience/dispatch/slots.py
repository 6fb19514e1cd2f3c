"""Episodes in flight: leased ones, and those that are just being leased."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass

from paceline_experience.jobs.ledgers import Ledgers, OpenLedger


class SlotAccounting:
    """Counts by job that are never below those in Redis.

    Slots are reserved before the ledger leases, so that concurrent streams do not use the same
    quota twice. If the outcome of a lease is unknown, its reservation counts until the ledger has
    been reloaded.
    """

    def __init__(self, ledgers: Ledgers) -> None:
        self._ledgers = ledgers
        self._reserved: Counter[str] = Counter()
        self._uncertain: Counter[str] = Counter()
        self._settling = asyncio.Lock()

    def reserved(self, job_id: str) -> int:
        """Reserved slots, which the ledger does not count."""
        return self._reserved[job_id] + self._uncertain[job_id]

    def of(self, entry: OpenLedger) -> int:
        """Episodes in flight of one job, including evals."""
        demand = entry.ledger.leases.demand()
        return demand.leased + demand.eval_leased + self.reserved(entry.job.status.job_id)

    def by_tenant(self) -> Counter[str]:
        """Episodes in flight of all jobs that this process owns."""
        found: Counter[str] = Counter()
        for entry in self._ledgers.active.values():
            found[entry.job.status.tenant] += self.of(entry)
        return found

    def reserve(self, job_id: str, slots: int) -> SlotReservation:
        """Reserve slots; enter the result while the ledger leases, or cancel it."""
        self._reserved[job_id] += slots
        return SlotReservation(self, job_id, slots)

    def end(self, job_id: str, slots: int, *, known: bool) -> None:
        """End a reservation; not `known`: it is uncertain what the ledger has leased of it."""
        self._reserved[job_id] -= slots
        if not known:
            self._uncertain[job_id] += slots

    async def settle(self) -> None:
        """Reload ledgers with uncertain leases; those stay uncertain where that fails.

        Raises:
            StoreError: the store is unreachable.
        """
        # Under a lock: concurrent streams must not subtract the same slots twice.
        async with self._settling:
            for job_id, slots in [item for item in self._uncertain.items() if item[1]]:
                with self._ledgers.isolate("cannot be reloaded", job_id):
                    if entry := self._ledgers.active.get(job_id):
                        await entry.ledger.refresh()
                    self._uncertain[job_id] -= slots


@dataclass(slots=True)
class SlotReservation(AbstractContextManager["SlotReservation"]):
    """Slots that are being leased; a context manager around the lease."""

    accounting: SlotAccounting
    job_id: str
    slots: int
    _ended: bool = False

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._end(known=kind is None)

    def cancel(self) -> None:
        """Nothing was leased; no effect after the end."""
        self._end(known=True)

    def _end(self, *, known: bool) -> None:
        if not self._ended:
            self._ended = True
            self.accounting.end(self.job_id, self.slots, known=known)
