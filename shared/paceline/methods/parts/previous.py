"""Reads the advantages of the preceding part in `experience.advantage_shaping`."""

from __future__ import annotations

from paceline.errors import InvalidError
from paceline.methods.parts.group_statistics import Floats
from paceline.plugins import EpisodeBatch


def advantages_before(batch: EpisodeBatch) -> Floats:
    """The advantages of the part before, [N] or [T].

    Raises:
        InvalidError: no part comes before.
    """
    if batch.advantages is None:
        raise InvalidError("it changes the advantages of another; list it in advantage_shaping")
    return batch.advantages


def episode_advantages_before(batch: EpisodeBatch) -> Floats:
    """The advantages of the part before, [N].

    Raises:
        InvalidError: no part comes before, or it gave values of tokens.
    """
    before = advantages_before(batch)
    if len(before) != len(batch.rewards):
        raise InvalidError("it needs advantages of episodes; the part before gave those of tokens")
    return before
