"""A reward that waits until a test lets it go on: its job cannot be over before the test looks."""

from __future__ import annotations

import re
import time
from pathlib import Path

from paceline.plugins import RewardInput

_LOOK_S = 0.02


def gated(item: RewardInput, *, gate: str, pattern: str, from_group: int = 0) -> float:
    """1 if `pattern` is found in the response, else 0.

    Of training groups with this number or a later one only once there is a file `gate`; the first
    that waits makes the file `asked_at(gate)`.
    """
    if _group_of(item.episode_id) >= from_group:
        asked_at(gate).touch()
        while not Path(gate).exists():
            time.sleep(_LOOK_S)
    return float(re.search(pattern, item.response) is not None)


def asked_at(gate: str | Path) -> Path:
    """The file that is there as soon as somebody has come to a gate."""
    return Path(f"{gate}.asked")


def _group_of(episode_id: str) -> int:
    """Its number; -1 for those that are measured only."""
    name = episode_id.split(".")[1].split("/")[0]
    return int(name) if name.isdigit() else -1
