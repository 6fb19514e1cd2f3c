"""Kind `python`: a function of the user's own, named by the option `function`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from paceline import plugins
from paceline.interfaces import RewardInput


def python(
    item: RewardInput,
    *,
    function: Annotated[str, Field(pattern="^[^:]+:[^:]+$")],
    **options: Any,
) -> Any:
    """What `function` (`module:function`) returns for this item."""
    return plugins.find("rewards", function)(item, **options)
