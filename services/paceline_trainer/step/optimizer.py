"""AdamW with a schedule and gradient clipping."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.config.job import OptimizerSpec
from paceline_trainer.step.model import PolicyModel


class Optimizer:
    """Updates the weights of a policy. The learning rate is a function of the step."""

    def __init__(self, policy: PolicyModel, spec: OptimizerSpec, *, total_steps: int) -> None:
        self._spec = spec
        self._policy = policy
        self.total_steps = total_steps
        with policy.in_float32():
            self._parameters = policy.trained()
        matrices = [p for p in self._parameters if p.ndim > 1]
        vectors = [p for p in self._parameters if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": spec.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.inner = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=spec.lr,
            betas=spec.betas,
            eps=spec.eps,
            fused=True,
        )

    def lr(self, step: int) -> float:
        """Learning rate of the update from `step` to `step + 1`."""
        spec = self._spec
        if step < spec.warmup_steps:
            return spec.lr * (step + 1) / spec.warmup_steps
        if spec.schedule == "constant":
            return spec.lr
        decay_steps = max(self.total_steps - spec.warmup_steps, 1)
        done = min((step - spec.warmup_steps) / decay_steps, 1.0)
        if spec.schedule == "linear":
            return spec.lr * (1.0 - done)
        return spec.lr * 0.5 * (1.0 + math.cos(math.pi * done))

    def zero(self) -> None:
        """Drop all gradients."""
        self.inner.zero_grad(set_to_none=True)

    def update(self, step: int, *, factor: float = 1.0) -> float:
        """Clip and step, with a factor on the learning rate; returns the gradient's norm.

        If it is not finite, nothing is updated, nor if it is 0: momentum alone must not move the
        weights.
        """
        total: Tensor = nn.utils.clip_grad_norm_(self._parameters, self._spec.max_grad_norm)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        if math.isfinite(norm) and norm > 0.0:
            for group in self.inner.param_groups:
                group["lr"] = self.lr(step) * factor
            self.inner.step()
            self._policy.changed()
        return norm
