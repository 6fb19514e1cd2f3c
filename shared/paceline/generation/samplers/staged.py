"""A curriculum in stages: from the first part of the tasks to all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from paceline.errors import InvalidError
from paceline.errors.wording import refusal
from paceline.platform.digest import Permutation
from paceline.plugins import Context, GroupOutcome, Pick, StrictModel


class Stage(StrictModel):
    """A stage of the curriculum; it ends at the reward or after the steps, whatever is first."""

    share: float = Field(gt=0.0, le=1.0)
    """Of the tasks, in the order of the source: the first stage is the easiest part of it."""
    reward: float | None = None
    """Mean reward of the newest `groups` groups of the stage at which it ends."""
    steps: int | None = Field(default=None, gt=0)
    """Trainer steps after which it ends."""


Stages = Annotated[list[Stage], Field(min_length=1, max_length=64)]
_STAGES: TypeAdapter[list[Stage]] = TypeAdapter(Stages)


class Staged:
    """Draws from a growing part of the tasks, each once per pass over the part.

    The memory has the stage, the step of its beginning and the mean rewards of its newest groups.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int = 0,
        epochs: int | None = None,
        stages: Stages,
        groups: Annotated[int, Field(ge=1, le=256)] = 64,
    ) -> None:
        """`groups`: how many of a stage have to be known before their mean can end it.

        Raises:
            InvalidError: there are no tasks, a stage never ends, or one is no larger than the one
                before.
        """
        if size < 1:
            raise InvalidError("tasks: the task source is empty; nothing can be sampled from it")
        try:
            self._stages = _STAGES.validate_python(stages)
        except ValidationError as error:
            places = ((".".join(map(str, each["loc"])), refusal(each)) for each in error.errors())
            told = "; ".join(f"experience.sampler.stages.{at}: {why}" for at, why in places)
            raise InvalidError(told) from None
        _check(self._stages)
        self._size, self._seed, self._groups = size, seed, groups
        self._end = None if epochs is None else epochs * size
        self._drawn = self._stage = self._place = 0
        self._now = 0  # the stage to draw from

    def next(self) -> Pick | None:
        """The next task of the present stage; None after the last epoch."""
        if self._end is not None and self._drawn >= self._end:
            return None
        if self._stage != self._now:
            self._stage, self._place = self._now, 0
        part = max(1, round(self._stages[self._stage].share * self._size))
        turn, at = divmod(self._place, part)
        self._drawn, self._place = self._drawn + 1, self._place + 1
        order = Permutation(part, (self._seed, "stage", self._stage, turn))
        return Pick(order(at), meta={"stage": self._stage})

    def state(self) -> dict[str, Any]:
        """Numbers of draws, in all and in the stage of the last one."""
        return {"drawn": self._drawn, "stage": self._stage, "place": self._place}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._drawn, self._stage = int(state["drawn"]), int(state["stage"])
        self._place = int(state["place"])

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Draw from the stage that the memory has."""
        self._now = int(memory.get("stage", 0))

    def observe(self, outcomes: Sequence[GroupOutcome], context: Context) -> dict[str, Any]:
        """Count the groups of the present stage, and go on to the next if it is over."""
        stage = int(context.memory.get("stage", 0))
        since = int(context.memory.get("since", context.step))
        recent: list[float] = list(context.memory.get("recent", ()))
        recent += [
            round(sum(each.rewards) / len(each.rewards), 4)
            for each in outcomes
            if each.rewards and each.meta.get("stage") == stage
        ]
        recent = recent[-self._groups :]
        if stage + 1 < len(self._stages) and self._is_over(stage, recent, context.step - since):
            return {"stage": stage + 1, "since": context.step, "recent": []}
        return {"stage": stage, "since": since, "recent": recent}

    def _is_over(self, stage: int, recent: Sequence[float], steps: int) -> bool:
        ends = self._stages[stage]
        if ends.steps is not None and steps >= ends.steps:
            return True
        known = len(recent) >= self._groups
        return ends.reward is not None and known and sum(recent) / len(recent) >= ends.reward


def _check(stages: Sequence[Stage]) -> None:
    for index, (stage, following) in enumerate(pairwise(stages)):
        field = f"experience.sampler.stages.{index}"
        if stage.reward is None and stage.steps is None:
            raise InvalidError(f"{field}: it never ends; give it a `reward` or `steps`")
        if following.share <= stage.share:
            raise InvalidError(
                f"{field}: share {stage.share}; that of the next stage, {following.share}, must "
                "be larger"
            )
