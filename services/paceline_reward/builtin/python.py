"""Kind `python`: a function of the user's own, named by the option `function`."""

from __future__ import annotations

from typing import Any

from paceline import plugins
from paceline.interfaces import RewardInput


def python(item: RewardInput, *, function: str, **options: Any) -> Any:
    """What `function` (`module:function`) returns for this item."""
    return plugins.find("rewards", function)(item, **options)
