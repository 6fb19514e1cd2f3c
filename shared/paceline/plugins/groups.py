"""The protocols of samplers, group filters and advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from paceline.plugins.episodes import Advantages, Context, EpisodeBatch, Floats


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
    """Computes the advantages of a whole batch; several follow each other."""

    def __call__(
        self, batch: EpisodeBatch, context: Context, *args: Any, **options: Any
    ) -> Floats | Advantages:
        """One value per episode [N], or per policy token [T].

        The arrays of `batch` must not be modified.
        """
        ...
