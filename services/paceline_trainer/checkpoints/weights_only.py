"""The weights of a checkpoint, without what training needs besides."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load

from paceline.errors import UnavailableError
from paceline_trainer.checkpoints.folders import SavedCheckpoint
from paceline_trainer.checkpoints.format import CheckpointReader, LoadFromJson
from paceline_trainer.step.model import PolicyModel

# What is frozen comes from the job's model: with LoRA, a checkpoint has the adapters only.
TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)


def load_weights(saved: SavedCheckpoint, policy: PolicyModel) -> None:
    """Collective: load the weights of a checkpoint, whatever world size wrote it.

    Its files are not compared with their digests: call `SavedCheckpoint.verify` on one rank.

    Raises:
        UnavailableError: the storage cannot be read, or it is of a model of another shape.
    """
    with policy.in_float32():
        model = get_model_state_dict(policy, options=TRAINED)
    state = {"model": without_tied(model, policy)}
    reader = CheckpointReader(saved.storage, saved.folder.name)
    with translated(saved.folder.name):
        load(state, storage_reader=reader, planner=LoadFromJson())
    with policy.in_float32():
        set_model_state_dict(policy, state["model"], options=TRAINED)
    policy.changed()


def without_tied(model: dict[str, Any], policy: PolicyModel) -> dict[str, Any]:
    """The tensors by name, without other names of tied parameters that are frozen."""
    for name, same in policy.tied:  # of a tied parameter that is frozen, torch leaves one name
        if f"inner.{same}" not in model:
            model.pop(f"inner.{name}", None)
    return model


@contextmanager
def translated(name: str) -> Generator[None]:
    """Translate torch's errors of all ranks, which are no `Exception`; raises the first one."""
    try:
        yield
    except CheckpointException as error:
        rank, (first, _) = min(error.failures.items())
        text = f"{name}: rank {rank}: {type(first).__name__}: {first}"
        raise UnavailableError(text) from error
