"""Ways in which an engine gets weights wrong whose bytes were right, and models that show them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.plugins import HeaderSpec, TensorSpec, WeightSnapshot
from paceline_harness.models.families import config_of

MODELS = ("llama", "llama_tied", "qwen3", "qwen3_moe", "olmo2", "gpt2")
Tensors = dict[str, Tensor]
Corruption = Callable[[Tensors, torch.Generator], bool]


def save_lively(family: str, folder: Path) -> Path:
    """Save a tiny model in which every tensor matters, as in a trained one."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config_of(family))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if _is_norm(name, parameter):
                parameter.add_(torch.randn_like(parameter) * 0.5)
            else:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    return folder


@dataclass(frozen=True, slots=True)
class CorruptedSnapshot:
    """A verified snapshot as a faulty engine reads it."""

    inner: WeightSnapshot
    tensors_read: Mapping[str, Tensor]

    @property
    def header(self) -> HeaderSpec:
        """That of the verified snapshot."""
        return self.inner.header

    def tensors(self) -> Iterator[tuple[TensorSpec, memoryview]]:
        """The entries of the verified snapshot with other bytes."""
        for entry, _ in self.inner.tensors():
            value = self.tensors_read[entry.name].contiguous()
            yield entry, value.view(-1).view(torch.uint8).numpy().data


def corrupted(snapshot: WeightSnapshot, kind: str, seed: int) -> CorruptedSnapshot | None:
    """The snapshot with a fault of this kind somewhere; None if the model has no place for it."""
    tensors = {
        entry.name: torch.frombuffer(bytearray(data), dtype=getattr(torch, entry.dtype)).view(
            tuple(entry.shape)
        )
        for entry, data in snapshot.tensors()
    }
    done = {**CORRUPTIONS, **HIDDEN}[kind](tensors, torch.Generator().manual_seed(seed))
    return CorruptedSnapshot(snapshot, tensors) if done else None


def _permuted_rows(tensors: Tensors, chance: torch.Generator) -> bool:
    name = _one_of(_matrices(tensors), chance)
    tensors[name] = tensors[name].roll(1, 0)
    return True


def _zeroed_layer(tensors: Tensors, chance: torch.Generator) -> bool:
    for name in _layer(tensors, chance):
        tensors[name].zero_()
    return True


def _transposed(tensors: Tensors, chance: torch.Generator) -> bool:
    square = [n for n in _matrices(tensors) if tensors[n].shape[-1] == tensors[n].shape[-2]]
    if not square:
        return False
    name = _one_of(square, chance)
    tensors[name] = tensors[name].mT
    return True


def _swapped_shards(tensors: Tensors, chance: torch.Generator) -> bool:
    """The halves of two ranks of tensor parallelism."""
    name = _one_of(_matrices(tensors), chance)
    tensors[name] = tensors[name].roll(tensors[name].shape[-1] // 2, -1)
    return True


def _wrong_scale(tensors: Tensors, chance: torch.Generator) -> bool:
    """A layer's matrices, as with scales of quantisation that are those of another layer."""
    for name in _layer(tensors, chance):
        tensors[name].mul_(1.5)
    return True


def _swapped_experts(tensors: Tensors, chance: torch.Generator) -> bool:
    fused = [name for name in tensors if name.endswith("experts.gate_up_proj")]
    if not fused:
        return False
    name = _one_of(fused, chance)
    tensors[name] = tensors[name].roll(1, 0)
    return True


def _dummy_tensor(tensors: Tensors, chance: torch.Generator) -> bool:
    """As the engine had it before the first load."""
    name = _one_of(_matrices(tensors), chance)
    tensors[name].copy_(torch.randn(tensors[name].shape, generator=chance) * 0.02)
    return True


def _norm_at_one(tensors: Tensors, chance: torch.Generator) -> bool:
    name = _one_of([n for n, value in tensors.items() if _is_norm(n, value)], chance)
    tensors[name].fill_(1.0)
    return True


CORRUPTIONS: Mapping[str, Corruption] = {
    "permuted rows": _permuted_rows,
    "zeroed layer": _zeroed_layer,
    "transposed": _transposed,
    "swapped shards": _swapped_shards,
    "wrong scale": _wrong_scale,
    "swapped experts": _swapped_experts,
    "dummy tensor": _dummy_tensor,
    "norm at one": _norm_at_one,
}


def _one_weight(tensors: Tensors, chance: torch.Generator) -> bool:
    """As when a tensor is that of an earlier version: no log-prob shows it."""
    name = _one_of(_matrices(tensors), chance)
    tensors[name].view(-1)[0] *= 1.02
    return True


HIDDEN: Mapping[str, Corruption] = {"one weight": _one_weight}
"""Faults that only a proof of the bytes finds."""


def _is_norm(name: str, value: Tensor) -> bool:
    return value.dim() == 1 and name.endswith("weight")


def _matrices(tensors: Tensors) -> list[str]:
    """Matrices of decoder layers."""
    return [n for n, value in tensors.items() if value.dim() > 1 and _layer_of(n) is not None]


def _layer(tensors: Tensors, chance: torch.Generator) -> list[str]:
    """The matrices of one decoder layer."""
    names = _matrices(tensors)
    chosen = _layer_of(_one_of(names, chance))
    return [name for name in names if _layer_of(name) == chosen]


def _layer_of(name: str) -> int | None:
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def _one_of(names: list[str], chance: torch.Generator) -> str:
    return names[int(torch.randint(len(names), (1,), generator=chance))]
