"""Whose log-probs are the centre of clipping."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from paceline.plugins import StrictModel


class KnownTokens(Protocol):
    """What the trainer knows of a rank's tokens before the first update of a step."""

    @property
    def behaviour(self) -> Tensor:
        """Log-probs as reported by the engine, float32 [N]."""
        ...

    @property
    def num_updates(self) -> int:
        """Updates of this step."""
        ...

    def current(self) -> Tensor:
        """Log-probs under the present weights; costs a forward pass without gradient."""
        ...


def batch(known: KnownTokens, options: StrictModel) -> Tensor | None:
    """The weights at the start of the step; None: those of the only update itself."""
    del options
    return None if known.num_updates == 1 else known.current()


def behaviour(known: KnownTokens, options: StrictModel) -> Tensor | None:
    """The policy that sampled, as in PPO without decoupling."""
    del options
    return known.behaviour
