"""Seeds of an environment on an OpenEnv server as a task source."""

from __future__ import annotations

from typing import Any

from paceline.environments.openenv.options import OpenEnvOptions
from paceline.environments.seeded import SeededTasks


class OpenEnvTasks(SeededTasks):
    """`size` seeds for `reset`."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        """Options are those of `OpenEnvOptions`."""
        parsed = OpenEnvOptions.model_validate(options)
        super().__init__("openenv", seed=seed, size=parsed.size, heldout=parsed.split == "heldout")
