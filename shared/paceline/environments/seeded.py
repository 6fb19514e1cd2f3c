"""Tasks that are nothing but seeds, for worlds that make everything else of them."""

from __future__ import annotations

import json

from paceline.platform.digest import number, task_id
from paceline.types import Task

_SEEDS = 1 << 30


class SeededTasks:
    """`size` tasks `{"seed": n}`; the last bit of a seed is its split, so that splits differ."""

    def __init__(
        self, environment: str, *, seed: int, size: int, heldout: bool, name: str = ""
    ) -> None:
        """`seed` and `name` determine the seeds; `name` is also part of the domain."""
        self._environment, self._name = environment, name
        self._seed, self._size, self._heldout = seed, size, heldout

    def __len__(self) -> int:
        """Number of tasks in one epoch."""
        return self._size

    def __getitem__(self, position: int, /) -> Task:
        """The task at a position."""
        if not 0 <= position < self._size:
            raise IndexError(position)
        seed = 2 * (number(self._seed, self._name, position) % _SEEDS) + self._heldout
        payload = json.dumps({"seed": seed})
        identity = task_id(f"{self._environment}/{self._name}", payload, 0)
        domain = "/".join(filter(None, (self._environment, self._name)))
        return Task(identity, self._environment, payload, domain=domain)


def seed_of(task: Task) -> int:
    """The seed that a task is: all episodes of a group begin alike."""
    return int(json.loads(task.payload)["seed"])
