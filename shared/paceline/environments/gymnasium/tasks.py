"""Seeds of an environment of Gymnasium as a task source."""

from __future__ import annotations

from typing import Any

from paceline.environments.gymnasium.options import GymnasiumOptions
from paceline.environments.seeded import SeededTasks
from paceline.errors import InvalidError


class GymnasiumTasks(SeededTasks):
    """`size` seeds for `reset`."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        """Options are those of `GymnasiumOptions`.

        Raises:
            InvalidError: Gymnasium is installed here and has no such environment.
        """
        parsed = GymnasiumOptions.model_validate(options)
        _check_id(parsed.id)
        heldout = parsed.split == "heldout"
        super().__init__("gymnasium", seed=seed, size=parsed.size, heldout=heldout, name=parsed.id)


def _check_id(name: str) -> None:
    try:
        import gymnasium
    except ImportError:  # environment workers have it, and tell
        return
    try:
        gymnasium.spec(name)
    except gymnasium.error.Error as error:
        raise InvalidError(f"tasks.options.id: {name!r}: {error}") from None
