"""A replay: the best episode of each task comes back whenever a group falls short of it."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.plugins import Context, FinishedGroup, Guest, Stored


class Best:
    """Stores the best episode of each group; the best stored one joins groups that are worse."""

    def keep(self, group: FinishedGroup, context: Context) -> Sequence[int]:
        """The first one with the highest reward."""
        del context
        return (group.rewards.index(max(group.rewards)),)

    def offer(
        self, group: FinishedGroup, stored: Sequence[Stored], context: Context
    ) -> Sequence[Guest]:
        """The newest of the best ones, if it beats the group."""
        del context
        rewards = [each.reward for each in stored]
        best = max(range(len(rewards)), key=lambda place: (rewards[place], place))
        return (Guest(best),) if rewards[best] > max(group.rewards) else ()
