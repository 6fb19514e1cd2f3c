"""What a job file may say under `rollout.engine` with `kind: sglang`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from paceline.config.base import Closed

MODULE = "sglang.launch_server"
Count = Field(default=1, ge=1)


class SglangOptions(Closed):
    """Which server, and how weights reach it."""

    python: Path = Path(".venv-sglang/bin/python")
    """Interpreter of the environment that SGLang is installed in."""
    module: str = MODULE
    args: tuple[str, ...] = ()
    """Further flags of the server, such as `--mem-fraction-static=0.8`."""
    environment: dict[str, str] = Field(default={})
    """Further variables of its process."""
    tp: int = Count
    dp: int = Count
    ep: int = Count
    """Tensor, data and expert parallel sizes."""
    device: str = ""
    """Empty: whatever SGLang finds."""
    cache_tokens: int = Field(default=0, ge=0)
    """Size of its KV cache; 0: what fits."""
    deterministic: bool = False
    """Batch-invariant kernels and seeded sampling; SGLang has them for GPUs only."""
    startup_timeout_s: float = Field(default=600.0, gt=0)
    stall_s: float = Field(default=120.0, gt=0)
    """A launched server that says nothing for so long, with requests to answer, is replaced."""
    url: str = ""
    """A server that someone else runs; none is launched then."""
    api_key: SecretStr = SecretStr("")
    load: Literal["tensor", "disk", "distributed"] = "tensor"
    """How weights travel: by the request, which points to memory shared with a server on this
    machine; through a folder; or over a process group."""
    shared_memory: bool | None = None
    """Null: with a launched server only."""
    folder: Path | None = None
    """Of `load: disk`; null: tmpfs, with a launched server."""
    bucket_bytes: int = Field(default=256 << 20, ge=1)
    backend: Literal["", "nccl", "gloo"] = ""
    """Of `load: distributed`; empty: gloo on a CPU, else nccl."""
