"""Reward `overlong`: a penalty for answers that come close to the length limit."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from paceline.plugins import RewardInput, declares

Tokens = Annotated[int, Field(gt=0)]


@declares(inline=True)
def overlong(
    item: RewardInput, *, limit: Tokens | None = None, buffer: Tokens | None = None
) -> float:
    """From 0 to -1 over the last `buffer` tokens before `limit` (DAPO, arXiv 2503.14476, 3.4).

    Args:
        item: its longest turn counts.
        limit: tokens at which the penalty is 1; null: the job's `sampling.max_tokens`.
        buffer: null: a fifth of the limit, as in the paper.
    """
    most = limit or item.max_tokens
    if not most:
        return 0.0
    width = min(buffer or max(most // 5, 1), most)
    longest = max((turn.num_tokens for turn in item.turns), default=0)
    return -min(max((longest - (most - width)) / width, 0.0), 1.0)
