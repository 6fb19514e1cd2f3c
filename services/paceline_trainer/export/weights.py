"""The model of a checkpoint, as transformers has it: whole, merged, or an adapter alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from paceline.config.sections.lora import LoraSpec
from paceline.config.sections.model import ModelSpec
from paceline.errors import ConfigError, IntegrityError
from paceline.models.weights import check_no_adapter
from paceline.platform.files import write_json
from paceline.weights.adapters import merged
from paceline_trainer.checkpoints.folders import SavedCheckpoint
from paceline_trainer.checkpoints.format import CheckpointReader
from paceline_trainer.step.lora import is_adapter, plain_name
from paceline_trainer.step.model import DTYPES

_PREFIX = "model.inner."
_A, _B = ".lora_A.weight", ".lora_B.weight"


def trained_tensors(saved: SavedCheckpoint) -> Iterator[tuple[str, Tensor]]:
    """What training has changed, by name, in float32, one tensor at a time.

    Raises:
        IntegrityError: the index or a file is damaged.
        UnavailableError: the storage does not answer.
    """
    yield from CheckpointReader(saved.storage, saved.folder.name).tensors(_PREFIX)


def write_model(
    saved: SavedCheckpoint,
    base: Path,
    output: Path,
    *,
    lora: LoraSpec | None,
    dtype: str,
    max_shard_size: str,
) -> None:
    """Write config and weights as `save_pretrained` does, adapters merged into their weights.

    The host needs memory for the model in `dtype`, or in float32 while adapters are merged.

    Raises:
        IntegrityError: the checkpoint is not one of this model.
        ConfigError: the base model cannot be loaded.
    """
    disable_progress_bar()
    model = (
        _trained(saved, base, DTYPES[dtype])
        if lora is None
        else _merged(saved, base, lora, DTYPES[dtype])
    )
    model.save_pretrained(output, max_shard_size=max_shard_size)


def write_adapter(
    saved: SavedCheckpoint, output: Path, *, lora: LoraSpec, base: ModelSpec, dtype: str
) -> None:
    """Write the adapter alone, as peft, SGLang and vLLM load it."""
    tensors: dict[str, Tensor] = {}
    for name, value in trained_tensors(saved):
        if is_adapter(name):
            plain = f"base_model.model.{plain_name(name)}"
            tensors[plain] = value.to(DTYPES[dtype]).contiguous()
    if not tensors:
        raise IntegrityError(f"{saved.path} has no adapter")
    modules = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in tensors}
    save_file(tensors, output / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.path,
        "revision": base.revision or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(modules),
    }
    write_json(output / "adapter_config.json", config)


def _trained(saved: SavedCheckpoint, base: Path, dtype: torch.dtype) -> Any:
    """The whole model of a checkpoint that has all weights."""
    try:
        config: Any = AutoConfig.from_pretrained(
            base, local_files_only=True, trust_remote_code=False
        )
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=False
            )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: cannot read {base}: {error}") from None
    state = {
        plain_name(name): value.to(dtype) if value.is_floating_point() else value
        for name, value in trained_tensors(saved)
    }
    result: Any = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    missing = [n for n, p in model.named_parameters() if p.is_meta]
    if missing or result.unexpected_keys:
        odd = (missing or result.unexpected_keys)[0]
        what = "has no" if missing else "has an unexpected"
        raise IntegrityError(f"{saved.path} {what} {odd}: it is of another model than {base}")
    return model


def _merged(saved: SavedCheckpoint, base: Path, lora: LoraSpec, dtype: torch.dtype) -> Any:
    """The base model with the adapters of a checkpoint in its weights, rounded once."""
    check_no_adapter(base)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            base,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: cannot read {base}: {error}") from None
    adapters = {plain_name(name): v for name, v in trained_tensors(saved) if is_adapter(name)}
    parameters = dict(model.named_parameters())
    factor = lora.alpha / lora.rank
    for name, a in adapters.items():
        if not name.endswith(_A):
            continue
        stem = name.removesuffix(_A)
        weight, b = parameters.get(f"{stem}.weight"), adapters.get(stem + _B)
        if weight is None or b is None or weight.shape != (len(b), a.shape[1]):
            raise IntegrityError(f"{saved.path}: the adapter {stem} does not fit {base}")
        weight.data = merged(weight.data, a, b * factor)
    return model.to(dtype)
