"""Large linear layers in oneDNN's packed layout, which is the fastest on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

MIN_ELEMENTS = 1 << 17  # below that the call costs more than it saves


class Packed:
    """A second, packed copy of a model's large linear layers; made for each version.

    Few rows times a large matrix, as in decoding, takes half to nine tenths of the time that it
    takes with the plain weights.
    """

    def __init__(self, model: nn.Module, *, min_elements: int = MIN_ELEMENTS) -> None:
        self._layers = [
            module
            for module in model.modules()
            if type(module) is nn.Linear
            and module.weight.numel() >= min_elements
            and _is_supported(module)
        ]

    def __len__(self) -> int:
        return len(self._layers)

    def pack(
        self, value_of: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
        """Forward functions of the layers, for weights `value_of(parameter)`, as they are made."""
        ops: Any = torch.ops.mkldnn
        for module in self._layers:
            packed = ops._reorder_linear_weight(value_of(module.weight), None)
            yield module, partial(_linear, packed, module.bias)


def _linear(packed: Tensor, bias: Tensor | None, input: Tensor) -> Tensor:
    ops: Any = torch.ops.mkldnn
    return ops._linear_pointwise(input, packed, bias, "none", [], "")


def _is_supported(module: nn.Linear) -> bool:
    """Whether this build of torch and this machine have oneDNN for such weights."""
    ops: Any = torch.ops.mkldnn
    if module.weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not (hasattr(ops, "_reorder_linear_weight") and hasattr(ops, "_linear_pointwise")):
        return False
    if module.weight.dtype == torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    return module.weight.dtype == torch.float32
