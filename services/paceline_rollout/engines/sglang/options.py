"""Options of `rollout.engine` with `kind: sglang` in a job file, and settings of a pool."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from paceline.plugins import StrictModel

MODULE = "sglang.launch_server"
Count = Field(default=1, ge=1, le=1024)


class SglangOptions(StrictModel):
    """What a job may choose: how the server computes, and how weights reach it."""

    tp: int = Count
    dp: int = Count
    ep: int = Count
    """Tensor, data and expert parallel sizes."""
    device: str = Field(default="", pattern="^[a-z]*$")
    """Empty: SGLang chooses."""
    cache_tokens: int = Field(default=0, ge=0)
    """Tokens in the KV cache; 0: as many as fit."""
    mem_fraction: float | None = Field(default=None, gt=0, lt=1)
    """Share of the device's memory for weights and KV cache; null: SGLang's own choice."""
    kv_dtype: Literal["auto", "bf16", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Type of the KV cache's elements."""
    chunked_prefill: int | None = Field(default=None, ge=-1)
    """Tokens of a prompt per chunk; -1: no chunks, null: SGLang's own choice."""
    deterministic: bool = False
    """Batch-invariant kernels and seeded sampling; GPUs only."""
    startup_timeout_s: float = Field(default=600.0, gt=0)
    stall_s: float = Field(default=120.0, gt=0)
    """A launched server with open requests that sends nothing for so long is restarted."""
    load: Literal["tensor", "disk", "distributed"] = "tensor"
    """How weights are transferred: in the request, or in shared memory that it points to; through
    a folder; or over a process group."""
    bucket_bytes: int = Field(default=256 << 20, ge=1)
    backend: Literal["", "nccl", "gloo"] = ""
    """For `load: distributed`; empty: gloo on CPUs, nccl on GPUs."""


class SglangSettings(StrictModel):
    """`engines.sglang` of a pool: what runs on its machines, which no job may change."""

    python: Path = Path(".venv-sglang/bin/python")
    """Interpreter of the virtual environment that SGLang is installed in."""
    module: str = MODULE
    args: tuple[str, ...] = ()
    """Further flags of the server, such as `--attention-backend=fa3`."""
    environment: dict[str, str] = Field(default={})
    """Further environment variables of the server."""
    url: str = ""
    """URL of a server to attach to; none is launched then."""
    api_key: SecretStr = Field(default=SecretStr(""), repr=False)
    shared_memory: bool | None = None
    """Whether the server shares this machine's memory; null: if it is launched."""
    folder: Path | None = None
    """For `load: disk`; null: tmpfs with a launched server, none with an attached one."""
