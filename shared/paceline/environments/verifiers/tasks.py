"""Rows of the data set of an environment of verifiers as a task source.

The data set stays where the environment is: a task is the number of a row.
"""

from __future__ import annotations

import json
from typing import Any

from paceline.environments.verifiers.options import VerifiersOptions
from paceline.platform.digest import task_id
from paceline.types import Task

_ENVIRONMENT = "verifiers"


class VerifiersTasks:
    """The first `size` rows."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        """Options are those of `VerifiersOptions`."""
        del seed
        self._options = VerifiersOptions.model_validate(options)

    def __len__(self) -> int:
        """Number of tasks in one epoch."""
        return self._options.size

    def __getitem__(self, position: int, /) -> Task:
        """The task at a position."""
        if not 0 <= position < self._options.size:
            raise IndexError(position)
        options = self._options
        payload = json.dumps({"split": options.split, "row": position})
        arguments = json.dumps(options.args, sort_keys=True)
        identity = task_id(f"{_ENVIRONMENT}/{options.id}/{arguments}", payload, 0)
        return Task(identity, _ENVIRONMENT, payload, domain=f"{_ENVIRONMENT}/{options.id}")
