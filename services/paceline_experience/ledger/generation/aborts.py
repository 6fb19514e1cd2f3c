"""Leases that have ended because their group no longer needs the episode."""

from __future__ import annotations

from paceline_experience.ledger.generation.modes import EpisodeKey
from paceline_experience.ledger.state import GroupRecord


class Aborts:
    """What each worker is to abort; told once, and found out at the next renewal if that is lost.

    Without it a worker would generate in vain until it renews the lease.
    """

    def __init__(self) -> None:
        self._ended: dict[str, list[EpisodeKey]] = {}

    def note(self, before: GroupRecord, after: GroupRecord | None) -> bool:
        """A group has changed or is gone; returns whether leases of it have ended."""
        found = False
        for index, state in enumerate(before.states):
            if state != "l" or (after is not None and after.states[index] == "l"):
                continue
            key = EpisodeKey(before.group_id, index, before.attempts[index])
            self._ended.setdefault(before.workers[index], []).append(key)
            found = True
        return found

    def forget(self) -> None:
        """The store was rolled back: what has ended may go on in it. Renewals tell of the rest."""
        self._ended.clear()

    def pop(self, worker_id: str) -> list[EpisodeKey]:
        """What a worker has not been told yet."""
        return self._ended.pop(worker_id, []) if self._ended else []
