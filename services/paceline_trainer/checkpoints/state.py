"""The state of training that a checkpoint has: as it is, or copied while training goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import get_state_dict

from paceline_trainer.checkpoints.weights_only import TRAINED, without_tied
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.model import PolicyModel
from paceline_trainer.step.optimizer import Optimizer

COPIED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class StagedCheckpoint:
    """The state of a rank after `step` updates, in the memory of the host.

    `in_place`: it is no copy, so nothing may change before it is written.
    """

    step: int
    state: dict[str, Any]
    in_place: bool = False


class Stager:
    """Takes the state of a rank, which is written by another thread."""

    def __init__(self, group: RankGroup, *, copied_bytes: int = COPIED_BYTES) -> None:
        """`copied_bytes`: up to this, a state is copied rather than written in place."""
        self._on_cpu = group.device.type == "cpu"
        self._copied_bytes = copied_bytes
        # Copies from a GPU are fast only into memory that is pinned, which takes long to allocate.
        self._copies = BlockingAsyncStager(cache_staged_state_dict=not self._on_cpu)

    def stage(
        self, step: int, state: dict[str, Any], policy: PolicyModel, *, local: bool
    ) -> StagedCheckpoint:
        """A copy of the state, unless that takes much of the memory in which the policy itself is.

        The next update has to wait for a state in place, so it is written to a `local` disk only.
        Sharded policies are never in place: they get other weights for a while, to score tokens.
        """
        alone = policy.whole and self._on_cpu and local
        if alone and _state_bytes(policy) > self._copied_bytes:
            return StagedCheckpoint(step, state, in_place=True)
        return StagedCheckpoint(step, self._copies.stage(state))


def trained_state(
    policy: PolicyModel, optimizer: Optimizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What training changes: tensors of the policy, and the optimiser's."""
    with policy.in_float32():
        model, inner = get_state_dict(policy, optimizer.inner, options=TRAINED)
    return without_tied(model, policy), inner


def _state_bytes(policy: PolicyModel) -> int:
    """Of the weights that are trained, and of both moments."""
    return 3 * sum(each.numel() * torch.float32.itemsize for each in policy.trained())
