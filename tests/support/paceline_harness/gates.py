"""A reward that blocks until a test opens a gate, so that a job cannot end too early."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

from paceline.plugins import RewardInput
from paceline.types import Score

_LOOK_S = 0.02
OTHERS_RAN = threading.Event()
"""What the import of `paceline_test_slow` waits for."""


def gated(item: RewardInput, *, gate: str, pattern: str, from_group: int = 0) -> Score:
    """1 if `pattern` is found in the response, else 0. The answer is its first two characters.

    Training groups from number `from_group` on wait for the file `gate` to exist; the first to wait
    creates the file `asked_at(gate)`.
    """
    if _group_of(item.episode_id) >= from_group:
        asked_at(gate).touch()
        while not Path(gate).exists():
            time.sleep(_LOOK_S)
    found = re.search(pattern, item.response) is not None
    return Score(float(found), parts={}, normalised_answer=item.response[:2])


def asked_at(gate: str | Path) -> Path:
    """The file that exists once an episode waits at a gate."""
    return Path(f"{gate}.asked")


def _group_of(episode_id: str) -> int:
    """Number of an episode's group; -1 for eval episodes."""
    name = episode_id.split(".")[1].split("/")[0]
    return int(name) if name.isdigit() else -1
