"""What a job's own allocator is told of a group, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.isolation.code.generation.starts import runs_of, starts_of_runs
from paceline.plugins import FinishedEpisode, FinishedTurn, OpenGroup, Pick

LACKS_MEMORY = {"lacks": "memory"}
"""The answer of a process that does not have the memory which a call names."""


def pick_fields(pick: Pick) -> list[Any]:
    """A pick as JSON."""
    return [pick.task, pick.variant, dict(pick.meta)]


def pick_of_fields(fields: list[Any]) -> Pick:
    """A pick from JSON."""
    return Pick(*fields)


def open_group_fields(group: OpenGroup) -> dict[str, Any]:
    """A group as JSON; its starts in runs."""
    return {
        "pick": pick_fields(group.pick),
        "starts": runs_of([each.start for each in group.episodes]),
        "episodes": [_episode_fields(each) for each in group.episodes],
        "num_open": group.num_open,
        "waves": group.waves,
    }


def open_group_of(fields: Mapping[str, Any]) -> OpenGroup:
    """A group from JSON."""
    episodes = fields["episodes"]
    starts = starts_of_runs(fields["starts"], most=len(episodes))
    return OpenGroup(
        pick=pick_of_fields(fields["pick"]),
        episodes=tuple(map(_episode_of, episodes, starts)),
        num_open=fields["num_open"],
        waves=fields["waves"],
    )


def _episode_fields(each: FinishedEpisode) -> list[Any]:
    turns = [
        [turn.end, turn.reward, turn.matched_expert, turn.patched, turn.first_error]
        for turn in each.turns
    ]
    parts = dict(each.parts)
    return [each.index, each.reward, each.answer, each.length, each.truncated, parts, turns]


def _episode_of(fields: list[Any], start: Any) -> FinishedEpisode:
    index, reward, answer, length, truncated, parts, turns = fields
    found = tuple(FinishedTurn(*turn) for turn in turns)
    return FinishedEpisode(index, start, reward, answer, length, truncated, parts, found)
