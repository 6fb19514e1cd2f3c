"""Reward `python`: a function of the user, named by the option `function`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from paceline.plugins import RewardInput, declares, registry


def _import(*, function: str, **options: Any) -> None:
    del options
    registry.find("rewards", function)


@declares(load=_import)
def python(
    item: RewardInput,
    *,
    function: Annotated[str, Field(pattern="^[^:]+:[^:]+$")],
    **options: Any,
) -> Any:
    """The result of `function` (`module:function`) for this item."""
    return registry.find("rewards", function)(item, **options)
