"""SGLang's device interface, implemented for a CPU."""

from __future__ import annotations

import gc
import platform
from typing import Any

import psutil
import torch
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

_FACTORIES = ("empty", "full", "ones", "tensor", "zeros")


class PlainCpu(SRTPlatform):
    """A platform with plain torch operators and gloo collectives."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def init_backend(self) -> None:
        """Replace pinned memory, which LoRA requests on any device, by ordinary memory."""
        for name in _FACTORIES:
            setattr(torch, name, _unpinned(getattr(torch, name)))
        torch.Tensor.pin_memory = lambda self, *args, **kwargs: self

    def get_device(self, device_id: int = 0) -> torch.device:
        """The only device."""
        return torch.device("cpu")

    def set_device(self, device: torch.device) -> None:
        """No-op: there is only one device."""

    def get_device_name(self, device_id: int = 0) -> str:
        """Name of the device for logs."""
        return "cpu"

    def get_device_uuid(self, device_id: int = 0) -> str:
        """The processor type, as there is only one device."""
        return platform.machine()

    def get_device_capability(self, device_id: int = 0) -> None:
        """None: capabilities are a CUDA concept."""

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Total bytes of memory."""
        return int(psutil.virtual_memory().total)

    def get_current_memory_usage(self, device: Any = None) -> float:
        """Used bytes of memory."""
        memory = psutil.virtual_memory()
        return float(memory.total - memory.available)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        """Free and total bytes of memory."""
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def empty_cache(self) -> None:
        """Release unused memory."""
        gc.collect()

    def synchronize(self) -> None:
        """No-op: operators are synchronous."""

    def get_torch_distributed_backend_str(self) -> str:
        """Backend for tensor-parallel ranks and weight updates."""
        return "gloo"

    def get_default_attention_backend(self) -> str:
        """The attention backend without custom kernels."""
        return "torch_native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        """There is no compiler backend."""
        return "eager"

    def get_dispatch_key_name(self) -> str:
        """Use `forward_native` of each operator."""
        return "native"


def _unpinned(make: Any) -> Any:
    if getattr(make, "drops_pinning", False):
        return make

    def made(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    made.drops_pinning = True  # type: ignore[attr-defined]
    return made
