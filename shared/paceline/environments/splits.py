"""Which part of all tasks belongs to a split."""

from __future__ import annotations

from paceline.errors import InvalidError


def part_of(count: int, split: str, *, heldout_share: int) -> tuple[int, int]:
    """Where the part of a split begins, and its size; one of `heldout_share` tasks is held out.

    Raises:
        InvalidError: there is no such split.
    """
    if split not in ("train", "heldout"):
        raise InvalidError(f"tasks.options.split: {split!r}; allowed: train, heldout")
    num_heldout = count // heldout_share
    num_train = count - num_heldout
    return (num_train, num_heldout) if split == "heldout" else (0, num_train)
