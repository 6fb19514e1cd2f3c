"""Where a failed episode may be taken up again, and episodes that do so."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.plugins import FinishedEpisode, OpenGroup, Start

Failed = tuple[FinishedEpisode, int]  # and how many of its turns to keep


def good_turns(episode: FinishedEpisode, *, compared: bool, share: float) -> int:
    """How many turns of a failed episode come before its first wrong one; at most all but the last.

    The first of these that says something decides:

    1. the first turn that is marked as an error;
    2. `compared`, that turns of the group are compared with those of an expert: the first turn that
       neither matches nor was replaced;
    3. the first turn with a negative reward;
    4. the last turn with a positive reward, which is kept, unless it is the last of all;
    5. `share` of the turns, rounded down.
    """
    turns = episode.turns
    wrong = [index for index, turn in enumerate(turns) if turn.first_error]
    if not wrong and compared:
        wrong = [i for i, turn in enumerate(turns) if not turn.matched_expert and not turn.patched]
    wrong = wrong or [index for index, turn in enumerate(turns) if turn.reward < 0.0]
    if wrong:
        return wrong[0]
    earned = [index + 1 for index, turn in enumerate(turns[:-1]) if turn.reward > 0.0]
    if earned:
        return earned[-1]
    return max(min(int(share * len(turns)), len(turns) - 1), 0)


def furthest(group: OpenGroup, *, success: float, share: float) -> list[Failed]:
    """Failed episodes with a turn to keep: those that keep most first, then the best rewarded."""
    every = (turn for episode in group.episodes for turn in episode.turns)
    compared = any(turn.matched_expert or turn.patched for turn in every)
    failed = [
        (episode, good_turns(episode, compared=compared, share=share))
        for episode in group.episodes
        if episode.reward <= success
    ]
    failed.sort(key=lambda pair: (-pair[1], -pair[0].reward, pair[0].index))
    return [(episode, kept) for episode, kept in failed if kept > 0]


def continued(parents: Sequence[Failed], count: int, *, variant: str) -> tuple[Start, ...]:
    """`count` episodes that continue these parents in turn; none without a parent."""
    if not parents:
        return ()
    chosen = (parents[index % len(parents)] for index in range(count))
    return tuple(
        Start(
            variant=variant,
            parent=(episode.index, episode.turns[kept - 1].end),
            meta={"kept": kept},
        )
        for episode, kept in chosen
    )
