"""Makes and tries the sampler and the allocator of a job, installed ones and those of its code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from paceline.errors import InvalidError, UnavailableError, plugin_boundary
from paceline.plugins import Allocator, Learns, Sampler, registry
from paceline_experience.ledger.generation.allocation import (
    Allocation,
    InstalledAllocation,
    attempt,
)
from paceline_experience.ledger.generation.learning import LearningPart, LearningPlugin
from paceline_experience.ledger.generation.memory import Memory
from paceline_experience.ledger.generation.plan import GenerationPlan
from paceline_experience.ledger.own.allocation import OwnAllocation
from paceline_experience.ledger.own.parts import NO_PARTS, OwnParts
from paceline_experience.ledger.own.plugin import OwnPlugin
from paceline_experience.ledger.own.sampler import AHEAD, DrawnTasks, OwnSampler
from paceline_experience.ledger.records import OutcomeRecord
from paceline_experience.ledger.task_cursor import Draw, TaskCursor, draw_of

TRIED_TASKS = 100  # for a sampler of tasks that are not built here
_TRY_S = 5.0  # of drawing whether there are tasks for a batch
_SAMPLER, _ALLOCATOR = "experience.sampler", "experience.allocator"


class _NoSampler:
    """A sampler of no tasks; it only holds its state."""

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}

    def next(self) -> int | None:
        return None

    def state(self) -> dict[str, Any]:
        return self._state

    def load(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state)


@dataclass(frozen=True, slots=True)
class GenerationParts:
    """What decides on the groups of a job before they begin, and what of it learns."""

    cursor: TaskCursor
    allocation: Allocation | None
    learners: list[LearningPart]
    own: list[OwnPlugin]  # those of the job's code

    def listen(self, answered: Callable[[], None]) -> None:
        """Call this when something that was not there yet may be there."""
        for each in self.own:
            each.on_answer = answered

    def close(self) -> None:
        """Ask for nothing more."""
        for each in self.own:
            each.close()


def generation_parts(
    plan: GenerationPlan, num_tasks: int, own: OwnParts = NO_PARTS
) -> GenerationParts:
    """The parts of a job over `num_tasks` tasks; `own` calls those of its code.

    Raises:
        InvalidError: an installed one refuses its options.
    """
    learners: list[LearningPart] = []
    of_code: list[OwnPlugin] = []
    cursor = _cursor(plan, num_tasks, own, learners, of_code)
    allocation = _allocation(plan, own, learners, of_code)
    learners += [each for each in of_code if each.learns]
    return GenerationParts(cursor, allocation, learners, of_code)


def _cursor(
    plan: GenerationPlan,
    num_tasks: int,
    own: OwnParts,
    learners: list[LearningPart],
    of_code: list[OwnPlugin],
) -> TaskCursor:
    kind = plan.sampler.kind
    if num_tasks == 0:
        return TaskCursor(_NoSampler(), kind=kind)
    if (plugin := plan.own_sampler) is not None:
        drawn = OwnSampler(plugin, own, num_tasks=num_tasks, seed=plan.seed, epochs=plan.epochs)
        of_code.append(drawn)
        return TaskCursor(drawn, kind=kind, ready=drawn.ready)
    with plugin_errors(_SAMPLER, kind):
        sampler = make_sampler(plan, num_tasks)
        if isinstance(sampler, Learns):
            learners.append(LearningPlugin(sampler, field=_SAMPLER, kind=kind))
        return TaskCursor(sampler, kind=kind)


def make_sampler(plan: GenerationPlan, num_tasks: int) -> Sampler:
    """The installed sampler of a job over `num_tasks` tasks."""
    make = registry.find("samplers", plan.sampler.kind)
    return make(num_tasks, seed=plan.seed, epochs=plan.epochs, **plan.sampler.options)


def _allocation(
    plan: GenerationPlan, own: OwnParts, learners: list[LearningPart], of_code: list[OwnPlugin]
) -> Allocation | None:
    wanted = plan.allocator
    if wanted is None:
        return None
    if (plugin := plan.own_allocator) is not None:
        found = OwnAllocation(plugin, own, plan)
        of_code.append(found)
        return found
    with plugin_errors(_ALLOCATOR, wanted.kind):
        make = registry.find("allocators", wanted.kind)
        allocator: Allocator = make(group_size=plan.group_size, **wanted.options)
    if isinstance(allocator, Learns):
        learners.append(LearningPlugin(allocator, field=_ALLOCATOR, kind=wanted.kind))
    return InstalledAllocation(allocator, kind=wanted.kind, context=plan.context)


def try_installed(plan: GenerationPlan, num_tasks: int) -> int:
    """Draw once, start a group, and let plug-ins learn from it; returns the task's position.

    Raises:
        InvalidError: one of them fails.
    """
    parts = generation_parts(plan, num_tasks)
    memory = _remembered(parts.learners)
    has_own_sampler = plan.own_sampler is not None
    drawn = (None if has_own_sampler else parts.cursor.draw()) or Draw(0, 0)
    asyncio.run(_try(parts, drawn, plan, memory, slow=False))
    problems = [parts.cursor.problem, *(each.problem for each in parts.learners)]
    if problem := next(filter(None, problems), ""):
        raise InvalidError(problem)
    return drawn.position


async def try_own(plan: GenerationPlan, num_tasks: int, own: OwnParts) -> None:
    """The same for those of the job's code: whether it draws a batch, and the same after a restart.

    Raises:
        InvalidError: one of them fails.
        UnavailableError: they cannot be called for now.
    """
    parts = generation_parts(plan, num_tasks, own)
    memory = _remembered(parts.learners)
    sampler = next((each for each in parts.own if isinstance(each, OwnSampler)), None)
    first = await _first_draws(sampler, plan, num_tasks) if sampler is not None else None
    drawn = draw_of(0, first.picks[0][0]) if first is not None else parts.cursor.draw()
    await _try(parts, drawn or Draw(0, 0), plan, memory, slow=True)
    if sampler is not None and first is not None and sampler.learns:
        await sampler.drawn(first.picks[0][1], 1)


def _remembered(learners: Sequence[LearningPart]) -> Memory:
    memory = Memory()
    for each in learners:
        each.remember(memory)
    return memory


async def _try(
    parts: GenerationParts, drawn: Draw, plan: GenerationPlan, memory: Memory, *, slow: bool
) -> None:
    """Start a group, and let plug-ins learn from it; only those of the job's code, or no such."""
    if parts.allocation is not None and parts.allocation.slow is slow:
        await attempt(parts.allocation, drawn)
    tried = OutcomeRecord(
        seq=0,
        task=drawn.position,
        rewards=(0.0, 1.0),
        answers=("", ""),
        lengths=(1, 1),
        truncated=(False, False),
        pick=drawn.pick,
    )
    failed = OutcomeRecord(seq=1, task=drawn.position, failed="group_failed", pick=drawn.pick)
    outcomes = (tried.outcome(), failed.outcome())
    context = replace(plan.context, outcomes=outcomes)
    for each in parts.learners:
        if isinstance(each, OwnPlugin) is slow:
            memory.apply(await each.learn(context, memory))
            each.remember(memory)


async def _first_draws(sampler: OwnSampler, plan: GenerationPlan, num_tasks: int) -> DrawnTasks:
    """The first tasks of a sampler of the job's code, which is checked by them."""
    first = await sampler.drawn({}, AHEAD, fresh=True)
    if not first.picks:
        raise sampler.failed(ValueError("it draws no task at all"))
    (_, state), *others = first.picks
    if others:
        again = await sampler.drawn(state, len(others), fresh=True)
        for (wanted, _), (other, _) in zip(others, again.picks, strict=False):
            if wanted != other:
                raise sampler.failed(
                    ValueError(
                        f"made anew, and with load() of the state after its first task, it draws "
                        f"{other}, not {wanted}; what it draws must follow from seed, state and "
                        "memory, since it goes on so after a restart"
                    )
                )
    await _check_own_fills_a_batch(sampler, first, plan, num_tasks)
    return first


async def _check_own_fills_a_batch(
    sampler: OwnSampler, first: DrawnTasks, plan: GenerationPlan, num_tasks: int
) -> None:
    wanted, found, drawn = plan.batch_groups, first, len(first.picks)
    until = asyncio.get_running_loop().time() + _TRY_S
    while drawn < wanted and not found.over and plan.epochs is not None:
        if asyncio.get_running_loop().time() > until:
            return
        found = await sampler.drawn(found.picks[-1][1], AHEAD)
        drawn += len(found.picks)
    if drawn < wanted and plan.epochs is not None:
        raise _too_few(plan, num_tasks, drawn)


def check_fills_a_batch(plan: GenerationPlan, num_tasks: int) -> None:
    """Raise `InvalidError` if all epochs together have fewer groups than one step trains on.

    A sampler of the job's code is not asked here.
    """
    wanted, epochs = plan.batch_groups, plan.epochs
    if epochs is None or plan.own_sampler is not None:
        return
    cursor = TaskCursor(make_sampler(plan, num_tasks), kind=plan.sampler.kind)
    drawn = sum(1 for _ in takewhile(lambda _: cursor.draw() is not None, range(wanted)))
    if drawn < wanted and not cursor.problem:
        raise _too_few(plan, num_tasks, drawn)


def _too_few(plan: GenerationPlan, num_tasks: int, drawn: int) -> InvalidError:
    return InvalidError(
        f"experience.batch_groups: {plan.batch_groups}, but tasks.epochs "
        f"{plan.epochs} of {num_tasks} tasks has only {drawn} groups, so that no step could "
        f"be trained; allowed: at most {drawn}, or more epochs or tasks"
    )


def plugin_errors(field: str, name: str) -> AbstractContextManager[None]:
    """Report whatever a plug-in raises inside as an invalid value of this field.

    An `UnavailableError` says that a store or a volume is away.
    """
    passes = (InvalidError, UnavailableError)
    return plugin_boundary(f"{field}: {name} refuses them", passes=passes)
