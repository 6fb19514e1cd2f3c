"""Calls the filters of a job on finished groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.config import JobSpec
from paceline.config.named import NamedPlugin, named
from paceline.errors import plugin_boundary
from paceline.platform.text import clipped
from paceline.plugins import Drop, Filter, FinishedGroup, Keep, Repair, registry
from paceline_experience.ledger.filters.answer import FilterDecision
from paceline_experience.ledger.own.parts import NO_PARTS, OwnParts
from paceline_experience.ledger.state import GroupRecord

_MAX_REASON = 64


class FilterChain:
    """The filters of a job, in their order."""

    def __init__(self, spec: JobSpec, own: OwnParts = NO_PARTS) -> None:
        """`own`: the filters that came with the job."""
        self._own = own
        self._filters = [each for each in named(spec) if each.kind == "filters"]
        self._installed: dict[str, Filter] = {
            each.name: registry.find("filters", each.name)
            for each in self._filters
            if not each.is_own
        }

    @property
    def slow(self) -> bool:
        """Whether some came with the job, so that answers may be a long time coming."""
        return any(each.is_own for each in self._filters)

    async def decision(self, group: FinishedGroup, *, repairable: int) -> FilterDecision:
        """What the filters say of a group, of which the first `repairable` can be generated again.

        What a filter wants again, and cannot be, is left out; those after it decide on the rest.

        Raises:
            InvalidError: a filter has raised, or answered something else.
            UnavailableError: one that came with the job cannot be called for now.
        """
        indices = tuple(range(len(group.rewards)))
        for each in self._filters:
            answer = await self._answered(each, group)
            if answer.repair:
                again = tuple(indices[i] for i in answer.repair if indices[i] < repairable)
                if again:
                    return FilterDecision(indices, repair=again)
                answer = answer.without_repair()
            if answer.reason:
                return answer
            indices = tuple(indices[i] for i in answer.kept)
            if len(answer.kept) < len(group.rewards):
                group = group.only(answer.kept)
        return FilterDecision(indices)

    async def _answered(self, each: NamedPlugin, group: FinishedGroup) -> FilterDecision:
        if each.is_own:
            found = await self._own.decided(each, group)
            return found if found.kept else replace(found, reason=clipped(each.name, _MAX_REASON))
        with plugin_boundary(f"{each.options_field}: {each.name}"):
            return answered(self._installed[each.name], group, each.options)


def answered(function: Filter, group: FinishedGroup, options: Mapping[str, Any]) -> FilterDecision:
    """What a single filter says of a group; it may raise anything.

    Raises:
        TypeError: the answer is something else.
        ValueError: the indices are not some of the group, in ascending order.
    """
    answer: Any = function(group, **options)
    size = len(group.rewards)
    if isinstance(answer, Drop):
        return FilterDecision((), reason=clipped(str(answer.reason), _MAX_REASON) or "unnamed")
    if isinstance(answer, Repair):
        return FilterDecision(tuple(range(size)), repair=answer.of(size))
    if not isinstance(answer, Keep):
        raise TypeError(f"an answer of type {type(answer).__name__}; Keep, Drop or Repair is due")
    return FilterDecision(answer.of(size))


def finished_group(record: GroupRecord) -> FinishedGroup:
    """A group with all its finished episodes, and its guests behind them."""
    found, guests = record.members(), len(record.guests)
    names = sorted({name for each in found for name in each.parts})
    nan = float("nan")
    return FinishedGroup(
        task=record.position,
        rewards=tuple(e.reward for e in found),
        answers=tuple(e.answer for e in found),
        lengths=tuple(e.policy_tokens for e in found),
        truncated=tuple(e.truncated for e in found),
        parts={name: tuple(e.parts.get(name, nan) for e in found) for name in names},
        replayed=(False,) * (len(found) - guests) + (True,) * guests if guests else (),
    )


def trial_group(parts: Sequence[str]) -> FinishedGroup:
    """A failure and a success, to try filters on before a job is accepted."""
    pair = (0.0, 1.0)
    return FinishedGroup(
        task=0,
        rewards=pair,
        answers=("0", "1"),
        lengths=(1, 1),
        truncated=(False, False),
        parts=dict.fromkeys(parts, pair) if len(parts) > 1 else {},
    )
