"""A reward that waits until the test lets it go on."""

import time
from pathlib import Path

from paceline.interfaces import RewardInput
from paceline.types import Score
from paceline_reward.builtin.regex import regex


def gated(item: RewardInput, *, gate: str, pattern: str) -> Score:
    """As `regex`, once there is a file `gate`."""
    while not Path(gate).exists():
        time.sleep(0.02)
    return regex(item, pattern=pattern)
