"""The staleness bound, `experience.max_staleness`: what is too old to be trained.

It is enforced three times: no more groups are admitted than can be used in time (`admission.py`),
leases name the oldest version that is of use, and groups whose oldest token is too old are dropped:
open ones that block admission (`leases.py`), and ready ones when a batch is made (`batches.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from paceline_experience.ledger.state import GroupRecord, LedgerState


def stale_groups(
    state: LedgerState, names: Iterable[str], *, step: int, max_staleness: int
) -> list[str]:
    """Groups whose oldest token would be more than `max_staleness` steps old at `step`."""
    return [name for name in names if state.staleness(state.groups[name], step) > max_staleness]


def too_late_groups(state: LedgerState, names: Iterable[str], *, max_staleness: int) -> list[str]:
    """Complete groups on which nothing is decided, as no batch can have any of their episodes.

    After a rewind that is so until the known batches are trained again. If filters, samplers or
    replays saw such a group, they would see other tokens than in an undisturbed run. In a
    synchronous job, which is to be repeatable, one such episode is enough.
    """
    step, suffices = state.unfixed_step(), any if max_staleness == 0 else all

    def late(group: GroupRecord) -> bool:
        oldest = (found.oldest_version for found in group.summaries())
        ages = [state.age(version) for version in oldest if version >= 0]
        return bool(ages) and suffices(step - age > max_staleness for age in ages)

    training = (name for name in names if not state.groups[name].is_eval)
    return [name for name in training if (g := state.groups[name]).complete and late(g)]


def oldest_usable_version(state: LedgerState, *, max_staleness: int) -> int:
    """The oldest version whose tokens can be trained at the present step, else the newest."""
    oldest = state.step - max_staleness
    # Over the known versions, not over numbers: the store may have lost one in between.
    newest_first = sorted(state.versions, reverse=True)
    fresh = takewhile(lambda known: state.age(known) >= oldest, newest_first)
    return min(fresh, default=state.version)
