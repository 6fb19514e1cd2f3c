"""Third-party plug-ins that declare their needs and how they may be called."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from paceline.plugins import RegularExpression, RewardInput, declares


@declares(needs=("group>=2",))
def pairwise(
    rewards: Sequence[float], groups: Sequence[int], lengths: Sequence[int]
) -> list[float]:
    del groups, lengths
    return list(rewards)


@declares(needs=("telepathy",))
def unheard_of(
    rewards: Sequence[float], groups: Sequence[int], lengths: Sequence[int]
) -> list[float]:
    del groups, lengths
    return list(rewards)


def _note(*, note: str, **options: str) -> None:
    del options
    if note:
        Path(note).touch()


@declares(inline=True)
def quick(
    item: RewardInput,
    *,
    mark: Annotated[str, RegularExpression()] = "!",
) -> float:
    return float(mark in item.response)


@declares(inline=True, load=_note)
def silent(item: RewardInput, *, note: str = "") -> float:
    """Has no entry point for its options, so its declarations are read in the child only."""
    return float(not note or Path(note).exists())
