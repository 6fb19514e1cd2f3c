"""An SGLang platform that needs neither a GPU nor SGLang's kernel library."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch

PROVEN = "0.5.23"
_BOX_OPERATORS = ("nms", "qnms")
# Keeps the library object alive: its operators vanish with it.
_declared: list[Any] = []


def activate() -> str | None:
    """The platform class, or None where a GPU is there to be used instead."""
    if torch.cuda.is_available():
        return None
    found = version("sglang")
    if found != PROVEN:
        raise RuntimeError(f"sglang {found} is installed; this platform is for {PROVEN}")
    _declare_box_operators()
    return "paceline_sglang_cpu.platform:PlainCpu"


def _declare_box_operators() -> None:
    """Make torchvision importable although its compiled part does not load without CUDA.

    Its Python side attaches fake kernels to these two operators and only needs them declared.
    """
    if _declared:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _BOX_OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)
