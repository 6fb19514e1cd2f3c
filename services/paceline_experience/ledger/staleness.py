"""The staleness bound, `experience.max_staleness`: what is too old to be trained.

It is enforced three times: no more groups are admitted than can be used in time (`admission.py`),
leases name the oldest version that is of use, and groups whose oldest token is too old are dropped:
open ones that block admission (`leases.py`), and ready ones when a batch is made (`batches.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from paceline_experience.ledger.state import LedgerState


def stale_groups(
    state: LedgerState, names: Iterable[str], *, step: int, max_staleness: int
) -> list[str]:
    """Groups whose oldest token would be more than `max_staleness` steps old at `step`."""
    return [name for name in names if state.staleness(state.groups[name], step) > max_staleness]


def oldest_usable_version(state: LedgerState, *, max_staleness: int) -> int:
    """The oldest version whose tokens can be trained at the present step, else the newest."""
    oldest = state.step - max_staleness
    # Over the known versions, not over numbers: the store may have lost one in between.
    newest_first = sorted(state.versions, reverse=True)
    fresh = takewhile(lambda known: state.age(known) >= oldest, newest_first)
    return min(fresh, default=state.version)
