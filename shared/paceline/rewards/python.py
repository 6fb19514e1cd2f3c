"""Reward `python`: a function of the user, named by the option `function`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from paceline.errors import InvalidError
from paceline.plugins import RewardInput


def python(
    item: RewardInput,
    *,
    function: Annotated[str, Field(pattern="^[^:]+:[^:]+$")],
    **options: Any,
) -> Any:
    """The result of `function` (`module:function`) for this item.

    Reward workers call that function instead of this one, after a check that the job may name it
    (`paceline_reward.parts`); this one describes the options.
    """
    del item, options
    raise InvalidError(f"{function!r} is called by reward workers only")
