"""Compiles what is computed on a GPU, where many small operations cost more than arithmetic.

Without a GPU, Triton and a C compiler, which Triton needs, everything runs as it is written; so it
does with TORCHDYNAMO_DISABLE=1, a setting of torch.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from paceline.platform.telemetry.logs import Log

Given = ParamSpec("Given")
Result = TypeVar("Result")
log = Log("compile")


@cache
def reason_not(kind: str) -> str:
    """Why nothing is compiled for this kind of device; empty: it is."""
    if kind != "cuda":
        return "there is no GPU"
    try:
        import triton  # pyright: ignore[reportMissingImports]
    except ImportError:
        return "Triton is not installed"
    del triton
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        return "Triton needs a C compiler"
    import torch._dynamo

    # What cannot be compiled runs as it is written.
    torch._dynamo.config.suppress_errors = True
    return ""


def fused(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """A function of tensors, the first of which says where: compiled on a GPU."""

    @cache
    def compiled() -> Callable[Given, Result]:
        return torch.compile(function, dynamic=True)

    @wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        first: Any = args[0]
        assert isinstance(first, Tensor)
        run = function if reason_not(first.device.type) else compiled()
        return run(*args, **kwargs)

    return call


def compile_layers(layers: list[nn.Module], device: torch.device) -> bool:
    """Compile the forward pass of decoder layers; returns whether that was possible."""
    if why := reason_not(device.type):
        if device.type == "cuda":
            log.warning("layers are not compiled", why=why)
        return False
    for layer in layers:
        own: Any = layer
        own.forward = torch.compile(own.forward, dynamic=True)
    log.info("layers are compiled", layers=len(layers))
    return True
