"""An allocator that came with a job: groups are started when it has answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.config.named import NamedPlugin
from paceline.isolation.code.generation.messages import open_group_fields, pick_fields
from paceline.isolation.code.generation.starts import pick_of, starts_of_runs
from paceline.plugins import MAX_WAVE, MAX_WAVES, Start
from paceline_experience.ledger.generation.allocation import (
    Wave,
    first_wave,
    next_wave,
    open_group,
)
from paceline_experience.ledger.generation.memory import Memory
from paceline_experience.ledger.generation.plan import GenerationPlan
from paceline_experience.ledger.own.parts import OwnParts
from paceline_experience.ledger.own.plugin import UNREADABLE, OwnPlugin
from paceline_experience.ledger.state import GroupRecord
from paceline_experience.ledger.task_cursor import Draw

_AT_ONCE = 32  # groups of a call


class OwnAllocation(OwnPlugin):
    """An `Allocation`; first waves hold for a step and a memory, and are asked for in batches."""

    slow = True

    def __init__(self, plugin: NamedPlugin, own: OwnParts, plan: GenerationPlan) -> None:
        super().__init__(plugin, own, given={"group_size": plan.group_size})
        self.closes_early = self.has("enough")
        self._total_steps, self._seed = plan.total_steps, plan.seed
        self._step = 0
        self._wanted: dict[str, Draw] = {}  # by the name of the group
        self._waves: dict[str, Wave] = {}

    def start(self, drawn: Draw, step: int) -> Wave | None:
        """See `Allocation`."""
        if step != self._step:
            self._step = step
            self._forget()
        found = self._waves.pop(drawn.name, None)
        if found is None and not self.problem:
            self._wanted[drawn.name] = drawn
            self._ahead.begin()
        return found

    async def begun(self, drawn: Draw, step: int) -> Wave:
        """See `Allocation`."""
        (wave,) = await self._first_waves([drawn], step)
        return wave

    async def more(self, group: GroupRecord, step: int) -> Wave | None:
        """See `Allocation`."""
        if group.waves >= MAX_WAVES:
            return None
        told = open_group_fields(open_group(group))
        answer = await self.ask("more", group=told, context=self._context(step))
        try:
            return next_wave(_starts(answer["wave"]), group)
        except UNREADABLE as error:
            raise self.failed(error) from None

    async def enough(self, group: GroupRecord) -> bool:
        """See `Allocation`."""
        if not self.closes_early:
            return False
        answer = await self.ask("enough", group=open_group_fields(open_group(group)))
        return answer.get("enough") is True

    def remember(self, memory: Memory) -> None:
        """See `LearningPart`."""
        super().remember(memory)
        self._forget()

    async def _ask_ahead(self) -> bool:
        """Ask for some waves; returns whether more are wanted."""
        wanted, at = [*self._wanted.values()][:_AT_ONCE], (self._step, self.memory)
        if not wanted:  # forgotten meanwhile
            return False
        waves = await self._first_waves(wanted, self._step)
        if at == (self._step, self.memory):
            for drawn, wave in zip(wanted, waves, strict=True):
                if self._wanted.pop(drawn.name, None) is not None:
                    self._waves[drawn.name] = wave
        self.on_answer()
        return bool(self._wanted)

    async def _first_waves(self, draws: Sequence[Draw], step: int) -> list[Wave]:
        picks = [pick_fields(pick_of(drawn.position, drawn.pick)) for drawn in draws]
        answer = await self.ask("start", picks=picks, context=self._context(step))
        try:
            raw: Any = answer["waves"]
            if len(raw) != len(draws):
                raise ValueError(f"{len(raw)} waves for {len(draws)} tasks")
            return [first_wave(_starts(runs)) for runs in raw]
        except UNREADABLE as error:
            raise self.failed(error) from None

    def _context(self, step: int) -> tuple[int, int, int]:
        return step, self._total_steps, self._seed

    def _forget(self) -> None:
        self._wanted.clear()
        self._waves.clear()


def _starts(runs: Any) -> list[Start]:
    return starts_of_runs(runs, most=MAX_WAVE + 1)
