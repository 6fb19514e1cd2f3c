"""LoRA adapters in a snapshot: two small tensors beside each weight that they change.

A snapshot with adapters has, for a weight `NAME.weight` of shape [out, in], the tensors
`NAME.lora_A.weight` [rank, in] and `NAME.lora_B.weight` [out, rank], which includes the scale:
the weight of that version is `W + B A` (LoRA, arXiv 2106.09685, section 4.1). As the weights
themselves stay the same from version to version, a delta of such a snapshot is as small as its
adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import InvalidError
from paceline.plugins import HeaderSpec, TensorSpec, WeightSnapshot
from paceline.weights.snapshot.manifest import ADAPTER_ENDS

A, B = ADAPTER_ENDS


def merged(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The weight with its adapter, computed in float32 and rounded once."""
    return torch.addmm(weight.float(), b.float(), a.float()).to(weight.dtype)


def merge_one(name: str, weight: Tensor, adapters: Mapping[str, Tensor]) -> Tensor:
    """The weight of this name, with its adapter if there is one.

    Raises:
        InvalidError: the adapter does not fit.
    """
    stem = name.removesuffix(".weight")
    a, b = adapters.get(stem + A), adapters.get(stem + B)
    if a is None or b is None:
        return weight
    if (*b.shape, *a.shape) != (weight.shape[0], len(a), len(a), *weight.shape[1:]):
        raise InvalidError(
            f"snapshot: the adapter of {name} has shapes {tuple(b.shape)} and {tuple(a.shape)}; "
            f"the weight has {tuple(weight.shape)}"
        )
    return merged(weight, a, b)


@dataclass(frozen=True, slots=True)
class MergedSnapshot:
    """A snapshot with adapters as engines load it: complete weights, one at a time."""

    inner: WeightSnapshot

    @property
    def header(self) -> HeaderSpec:
        """The header of the snapshot, with the entries of the adapters."""
        return self.inner.header

    def tensors(self) -> Iterator[tuple[TensorSpec, memoryview]]:
        """Entry and bytes of each tensor that is not part of an adapter.

        Raises:
            InvalidError: an adapter does not fit its weight.
        """
        found = list(self.inner.tensors())
        adapters = {e.name: _tensor(e, data) for e, data in found if e.name.endswith(ADAPTER_ENDS)}
        for entry, data in found:
            if entry.name in adapters:
                continue
            weight = _tensor(entry, data)
            whole = merge_one(entry.name, weight, adapters)
            same = whole is weight
            yield entry, data if same else whole.view(-1).view(torch.uint8).numpy().data


def _tensor(entry: TensorSpec, data: memoryview) -> Tensor:
    flat = torch.frombuffer(data, dtype=getattr(torch, entry.dtype))
    return flat.view(tuple(entry.shape))
