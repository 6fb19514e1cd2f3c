"""Weights of large linear layers in the order in which a CPU reads them fastest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

LEAST = 1 << 17  # elements; below that the call costs more than it saves


class Packed:
    """A second copy of a model's large linear layers, for oneDNN; made anew for each version.

    Few rows times a large matrix, which is what decoding is, takes half to nine tenths of the
    time that it takes with the weights as they are.
    """

    def __init__(self, model: nn.Module, *, least: int = LEAST) -> None:
        self._layers = [
            module
            for module in model.modules()
            if type(module) is nn.Linear and module.weight.numel() >= least and _served(module)
        ]

    def __len__(self) -> int:
        return len(self._layers)

    def pack(
        self, value_of: Callable[[Tensor], Tensor]
    ) -> list[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
        """Forwards for the layers, for weights that `value_of` gives instead of theirs."""
        ops: Any = torch.ops.mkldnn
        return [
            (
                module,
                partial(
                    _linear, ops._reorder_linear_weight(value_of(module.weight), None), module.bias
                ),
            )
            for module in self._layers
        ]


def _linear(packed: Tensor, bias: Tensor | None, input: Tensor) -> Tensor:
    ops: Any = torch.ops.mkldnn
    return ops._linear_pointwise(input, packed, bias, "none", [], "")


def _served(module: nn.Linear) -> bool:
    """Whether this build and machine have oneDNN for such weights."""
    ops: Any = torch.ops.mkldnn
    if module.weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not (hasattr(ops, "_reorder_linear_weight") and hasattr(ops, "_linear_pointwise")):
        return False
    if module.weight.dtype == torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    return module.weight.dtype == torch.float32
