"""Choice of a few episodes of a group, as DART makes it (arXiv 2509.23866)."""

from __future__ import annotations

from collections.abc import Sequence


def trimmed(successes: Sequence[bool], keep: int) -> list[int]:
    """Indices of the first `keep` episodes, with a success and a failure if there are both.

    The last one makes room for the first of a kind that is missing.
    """
    chosen = list(range(min(keep, len(successes))))
    present = successes[:keep]
    for kind in (True, False):
        if kind not in present and kind in successes:
            chosen[-1] = successes.index(kind)
    return chosen
