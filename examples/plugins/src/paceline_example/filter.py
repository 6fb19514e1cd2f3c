"""A filter: whether a finished group is worth training on, and which of its episodes."""

from __future__ import annotations

from paceline.plugins import Drop, FinishedGroup, Keep


def solved(group: FinishedGroup, *, at_least: float = 1.0) -> Keep | Drop:
    """Drop groups whose task the policy has solved; leave out answers that were cut off.

    A task is solved if no reward is below `at_least`. A group with nothing but truncated answers
    is dropped.
    """
    if min(group.rewards) >= at_least:
        return Drop("solved")
    whole = [index for index, cut_off in enumerate(group.truncated) if not cut_off]
    return Keep(whole) if whole else Drop("truncated")
