"""An average of the policy's weights over the last steps, in float32."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline_trainer.step.model import PolicyModel
from paceline_trainer.step.versions import local, local_shards, with_weights


class WeightAverage:
    """The exponentially weighted average of PPO-EWMA (arXiv 2110.00641), with resets.

    After `t` steps it is sum_k b^(t-k) w_k / sum_k b^(t-k). If too few tokens were active in a
    step, it starts again from the present weights (arXiv 2605.12070).
    """

    def __init__(self, policy: PolicyModel, *, beta: float, reset_below: float) -> None:
        self._policy = policy
        self._beta = beta
        self._reset_below = reset_below
        with policy.in_float32():
            self._average = {
                name: parameter.detach().clone().float()
                for name, parameter in policy.named_parameters()
                if parameter.requires_grad
            }
        self._sum = torch.ones((), dtype=torch.float64)  # of the powers of b

    @torch.no_grad()
    def follow(self, active_fraction: float) -> bool:
        """Add the weights after a step; returns whether it was reset."""
        reset = active_fraction < self._reset_below
        total = 1.0 if reset else self._beta * float(self._sum) + 1.0
        self._sum.fill_(total)
        for average, present in zip(self._shards(), self._present(), strict=True):
            average.lerp_(present.float(), 1.0 / total)
        return reset

    @contextmanager
    def restored(self) -> Generator[None]:
        """Give the policy the average inside the context."""
        with with_weights(self._policy, self._shards()):
            yield

    def state(self) -> dict[str, Any]:
        """What a checkpoint has of it; loading fills these tensors."""
        return {"average": self._average, "sum": self._sum}

    @torch.no_grad()
    def start_again(self) -> None:
        """Begin from the present weights: of a checkpoint that has no average."""
        self._sum.fill_(1.0)
        for average, present in zip(self._shards(), self._present(), strict=True):
            average.copy_(present)

    def _present(self) -> list[Tensor]:
        with self._policy.in_float32():
            return local_shards(self._policy)

    def _shards(self) -> list[Tensor]:
        return [local(each) for each in self._average.values()]
