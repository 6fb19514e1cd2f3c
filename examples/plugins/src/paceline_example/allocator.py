"""An allocator: how many episodes a task gets."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.plugins import Context, Limits, OpenGroup, Pick, Start


class SecondTry:
    """Half of a group first; tasks that nobody has solved get the other half, at `temperature`."""

    def __init__(self, *, group_size: int, temperature: float = 1.2) -> None:
        self._first = max(1, group_size // 2)
        self._left = group_size - self._first
        self._temperature = temperature

    def start(self, pick: Pick, context: Context) -> Sequence[Start]:
        """The first wave."""
        del pick, context
        return [Start()] * self._first

    def more(self, group: OpenGroup, context: Context) -> Sequence[Start]:
        """The second wave, if it is needed."""
        del context
        if group.waves > 1 or max(group.rewards) > 0:
            return ()
        return [Start("second", limits=Limits(temperature=self._temperature))] * self._left
