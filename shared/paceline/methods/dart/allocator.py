"""DART's number and length of rollouts (arXiv 2509.23866; release: dart_rollouter, task_loader)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from paceline.errors import InvalidError
from paceline.methods.parts.waves import Waves
from paceline.plugins import MAX_WAVE, Context, GroupOutcome, Limits, OpenGroup, Pick, Start

_NEVER = 0  # longest success of a task that had none


class DartRollouts(Waves):
    """Fewer episodes for tasks that mostly succeed, none longer than a success so far.

    The memory has by task its newest rewards and the longest success in policy tokens. Steps of a
    finished episode are not part of outcomes, so it is tokens that are limited, not turns.
    """

    def __init__(
        self,
        *,
        group_size: int,
        most: Annotated[int, Field(ge=1, le=MAX_WAVE)] | None = None,
        least: Annotated[int, Field(ge=1, le=MAX_WAVE)] = 2,
        threshold: Annotated[float, Field(gt=0.0, le=1.0)] = 0.6,
        slope: Annotated[float, Field(gt=0.0)] = 9.0,
        shift: Annotated[float, Field(ge=0.0)] = 7.0,
        last: Annotated[int, Field(ge=1, le=256)] = 8,
        slack: Annotated[float, Field(ge=1.0)] | None = None,
        success: float = 0.5,
    ) -> None:
        """`most` episodes, `group_size` if null, while the success rate is below `threshold`.

        From there on floor(`slope` / rate - `shift`), at least `least`; the rate is the mean of the
        `last` newest rewards, clipped to 0 to 1, and 0 for tasks that were never tried.

        `slack`: an episode may have this times the policy tokens of the longest success of its
        task; null: no limit. `success`: rewards above it are successes.

        Raises:
            InvalidError: `least` is more than `most`, or the group larger than a wave.
        """
        super().__init__(group_size if most is None else most)
        if least > self._size:
            raise InvalidError(f"least: {least} with most {self._size}; at most that")
        self._least, self._threshold, self._last = least, threshold, last
        self._slope, self._shift = slope, shift
        self._slack, self._success = slack, success
        self._memory: Mapping[str, Any] = {}

    def start(self, pick: Pick, context: Context) -> Sequence[Start]:
        """Equal episodes."""
        del context
        rewards, longest = self._memory.get(str(pick.task), ((), _NEVER))
        rate = sum(rewards) / len(rewards) if rewards else 0.0
        return (Start(limits=self.limits(longest)),) * self.number(rate)

    def number(self, rate: float) -> int:
        """Episodes of a task with this success rate."""
        if rate < self._threshold:
            return self._size
        wanted = math.floor(self._slope / rate - self._shift + 1e-9)
        return min(max(wanted, self._least), self._size)

    def limits(self, longest: int) -> Limits:
        """Limits of the episodes of a task with a longest success of as many policy tokens."""
        if self._slack is None or longest == _NEVER:
            return Limits()
        return Limits(max_tokens=math.ceil(self._slack * longest))

    def more(self, group: OpenGroup, context: Context) -> Sequence[Start]:
        """Nothing."""
        del group, context
        return ()

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Decide by this memory from now on."""
        self._memory = memory

    def observe(self, outcomes: Sequence[GroupOutcome], context: Context) -> dict[str, Any]:
        """Learn from the outcomes of tasks; failed groups say nothing."""
        changed: dict[str, Any] = {}
        for outcome in outcomes:
            if not outcome.rewards:
                continue
            key = str(outcome.task)
            rewards, longest = changed.get(key) or context.memory.get(key) or ((), _NEVER)
            new = (round(min(max(reward, 0.0), 1.0), 6) for reward in outcome.rewards)
            changed[key] = [[*rewards, *new][-self._last :], max(longest, self._longest(outcome))]
        return changed

    def _longest(self, outcome: GroupOutcome) -> int:
        pairs = zip(outcome.rewards, outcome.lengths, strict=False)
        return max((length for reward, length in pairs if reward > self._success), default=_NEVER)
