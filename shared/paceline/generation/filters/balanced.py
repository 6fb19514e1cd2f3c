"""Keeps a part of a large group, with a success and a failure in it if the group has both."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from paceline.plugins import FinishedGroup, Keep
from paceline.plugins.groups import trimmed

Count = Annotated[int, Field(ge=2, le=4096)]


def balanced(group: FinishedGroup, *, keep: Count, success: float = 0.5) -> Keep:
    """Keep the first `keep` episodes, the last of which makes room for a missing kind.

    The selection is DART's (arXiv 2509.23866). The advantage `dart_trim` makes it by weights:
    there the baseline of a group is over all episodes, here over those that are kept.

    Args:
        group: of any size; a smaller one is kept whole.
        keep: episodes that are kept at most.
        success: rewards above it are successes, all others failures.
    """
    return Keep(trimmed([reward > success for reward in group.rewards], keep))
