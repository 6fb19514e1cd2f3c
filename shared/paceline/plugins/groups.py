"""The protocols of samplers, group filters and advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]


class Sampler(Protocol):
    """Decides the order of tasks. Its state is saved with the trainer's step."""

    def next(self) -> int | None:
        """Index of the next task; None after the last epoch."""
        ...

    def state(self) -> dict[str, Any]:
        """JSON-compatible state, restored by `load`."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        ...


class GroupFilter(Protocol):
    """Decides whether a finished group is trained on."""

    def __call__(self, rewards: Sequence[float], **options: Any) -> str:
        """The reason to drop the group, or empty to keep it."""
        ...


class Advantage(Protocol):
    """Computes the advantages of a whole batch, one per episode."""

    def __call__(
        self, rewards: Floats, groups: Ints, lengths: Ints, *args: Any, **options: Any
    ) -> Floats:
        """`rewards` [N], `groups` [N], `lengths` [N] in policy tokens -> [N].

        Episodes of one group have equal numbers in `groups`. The inputs must not be modified.
        """
        ...
