"""What a filter says of a group."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FilterDecision:
    """Which of the finished episodes of a group are kept, or generated again, by their place."""

    kept: tuple[int, ...]  # none: the group is dropped
    reason: str = ""  # why it is dropped
    repair: tuple[int, ...] = ()

    def without_repair(self) -> FilterDecision:
        """What it comes to if nothing can be generated again."""
        left = tuple(place for place in self.kept if place not in self.repair)
        return FilterDecision(left, reason="" if left else "not repaired")
