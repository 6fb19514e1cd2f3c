"""Whose log-probs are the centre of clipping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paceline.plugins import StrictModel


class KnownTokens(Protocol):
    """A rank's tokens as the trainer knows them before the first update of a step."""

    @property
    def behaviour(self) -> Tensor:
        """Log-probs as reported by the engine, float32 [N]."""
        ...

    @property
    def ages(self) -> Tensor:
        """Steps between the version that sampled each token and this step, int64 [N]."""
        ...

    @property
    def num_updates(self) -> int:
        """Updates of this step."""
        ...

    def current(self) -> Tensor:
        """Log-probs under the present weights; costs a forward pass without gradient."""
        ...

    def sampled(self) -> Tensor:
        """Log-probs under the weights that sampled each token; NaN where they are not kept.

        Costs a forward pass per version, over the sequences that have tokens of it. For plug-ins
        that declare the need `snapshots`.
        """
        ...

    def averaged(self) -> Tensor:
        """Log-probs under the average of weights; for those that need `weight_average`."""
        ...


@dataclass(frozen=True, slots=True)
class Between:
    """A proximal policy between the one that sampled and the one that is trained, in log-probs.

    It moves with the policy during the updates of a step, without a forward pass of its own.
    """

    share: Tensor  # [N], in [0, 1]: 0 is behaviour, 1 the current policy; NaN: see `logprobs`
    logprobs: Tensor | None = None  # [N], used where the share is NaN


def batch(known: KnownTokens, options: StrictModel) -> Tensor | None:
    """The weights at the start of the step; None: those of the only update itself."""
    del options
    return None if known.num_updates == 1 else known.current()


def behaviour(known: KnownTokens, options: StrictModel) -> Tensor | None:
    """The policy that sampled, as in PPO without decoupling."""
    del options
    return known.behaviour
