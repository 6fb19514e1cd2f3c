"""Third-party plug-ins that declare their needs and how they may be called."""

from pathlib import Path
from typing import Annotated

from paceline.plugins import Context, EpisodeBatch, RegularExpression, RewardInput, declares


@declares(needs=("group>=2",))
def pairwise(batch: EpisodeBatch, context: Context) -> list[float]:
    del context
    return batch.rewards.tolist()


@declares(needs=("telepathy",))
def unheard_of(batch: EpisodeBatch, context: Context) -> list[float]:
    del context
    return batch.rewards.tolist()


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
