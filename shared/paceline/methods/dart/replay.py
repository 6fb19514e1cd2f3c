"""DART's pool of successes (arXiv 2509.23866; release: the data manager's group assembly)."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.plugins import Context, FinishedGroup, Guest, Stored


class DartPool:
    """A group without a success gets the newest one of its task in place of its first failure.

    The guest keeps the log-probs of the policy that sampled it. The release takes those of the
    present policy instead, which hides how far it is off.
    """

    def __init__(self, *, success: float = 0.5) -> None:
        """`success`: rewards above it are successes."""
        self._success = success

    def keep(self, group: FinishedGroup, context: Context) -> Sequence[int]:
        """The successes."""
        del context
        return tuple(n for n, reward in enumerate(group.rewards) if reward > self._success)

    def offer(
        self, group: FinishedGroup, stored: Sequence[Stored], context: Context
    ) -> Sequence[Guest]:
        """One success, if the group has none; a group of one keeps its failure beside it."""
        del context
        if max(group.rewards) > self._success:
            return ()
        return (Guest(len(stored) - 1, replaces=0 if len(group.rewards) > 1 else None),)
