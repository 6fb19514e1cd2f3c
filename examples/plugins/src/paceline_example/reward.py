"""A reward for one response."""

from __future__ import annotations

import json
from itertools import takewhile
from typing import Annotated

from pydantic import Field

from paceline.plugins import RewardInput, declares
from paceline.types import Score


# Cannot hang or crash, so it may run inside the reward worker.
@declares(inline=True)
def beginning(item: RewardInput, *, partial: Annotated[float, Field(ge=0, le=1)] = 0.5) -> Score:
    """1 for the exact answer, up to `partial` for a correct beginning."""
    answer = str(json.loads(item.task.payload)["answer"])
    response = item.response.strip()
    same = list(takewhile(lambda pair: pair[0] == pair[1], zip(answer, response, strict=False)))
    share = len(same) / max(len(answer), 1)
    reward = 1.0 if response == answer else partial * share
    return Score(reward=reward, parts={"share": share}, raw_answer=item.response)
