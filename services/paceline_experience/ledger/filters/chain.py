"""Calls the filters of a job on finished groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.config import JobSpec
from paceline.errors import InvalidError
from paceline.plugins import Drop, Filter, FinishedGroup, Keep, registry
from paceline_experience.ledger.state import GroupRecord


class FilterChain:
    """The filters of a job, in their order."""

    def __init__(self, spec: JobSpec) -> None:
        self._filters: list[tuple[str, Filter, dict[str, Any]]] = [
            (f.kind, registry.find("filters", f.kind), f.options) for f in spec.experience.filters
        ]

    def kept(self, group: FinishedGroup) -> tuple[int, ...]:
        """Indices of the episodes that all filters keep; none: the group is dropped.

        Raises:
            InvalidError: a filter has raised, or answered something else.
        """
        indices = tuple(range(len(group.rewards)))
        for number, (kind, function, options) in enumerate(self._filters):
            try:
                chosen = called(function, group, options)
            except (Exception, SystemExit) as error:  # the boundary of a plug-in
                raise InvalidError(
                    f"experience.filters.{number}: {kind}: {type(error).__name__}: {error}"
                ) from error
            indices = tuple(indices[i] for i in chosen)
            if not indices:
                break
            if len(chosen) < len(group.rewards):
                group = group.only(chosen)
        return indices


def called(function: Filter, group: FinishedGroup, options: Mapping[str, Any]) -> tuple[int, ...]:
    """Indices of the episodes that a filter keeps, none if it drops the group; may raise anything.

    Raises:
        TypeError: the answer is something else.
        ValueError: the indices are not some of the group, in ascending order.
    """
    answer: Any = function(group, **options)
    if isinstance(answer, Drop):
        return ()
    if not isinstance(answer, Keep):
        raise TypeError(f"an answer of type {type(answer).__name__}; Keep or Drop is needed")
    return answer.of(len(group.rewards))


def finished_group(record: GroupRecord) -> FinishedGroup:
    """A group with all its finished episodes."""
    found = record.summaries()
    names = sorted({name for each in found for name in each.parts})
    nan = float("nan")
    return FinishedGroup(
        task=record.position,
        rewards=tuple(e.reward for e in found),
        answers=tuple(e.answer for e in found),
        lengths=tuple(e.policy_tokens for e in found),
        truncated=tuple(e.truncated for e in found),
        parts={name: tuple(e.parts.get(name, nan) for e in found) for name in names},
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
