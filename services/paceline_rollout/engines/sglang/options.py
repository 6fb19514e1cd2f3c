"""What a job file may say under `rollout.engine` with `kind: sglang`, and what only a pool may."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from paceline.config.base import Closed

MODULE = "sglang.launch_server"
Count = Field(default=1, ge=1, le=1024)


class SglangOptions(Closed):
    """How the server computes, and how weights reach it: what a job may choose."""

    tp: int = Count
    dp: int = Count
    ep: int = Count
    """Tensor, data and expert parallel sizes."""
    device: str = Field(default="", pattern="^[a-z]*$")
    """Empty: whatever SGLang finds."""
    cache_tokens: int = Field(default=0, ge=0)
    """Size of its KV cache; 0: what fits."""
    mem_fraction: float | None = Field(default=None, gt=0, lt=1)
    """Share of the device's memory for weights and KV cache; null: SGLang's own choice."""
    kv_dtype: Literal["auto", "bf16", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Of the KV cache."""
    chunked_prefill: int | None = Field(default=None, ge=-1)
    """Tokens of a prompt that are computed at once; -1: all, null: SGLang's own choice."""
    deterministic: bool = False
    """Batch-invariant kernels and seeded sampling; SGLang has them for GPUs only."""
    startup_timeout_s: float = Field(default=600.0, gt=0)
    stall_s: float = Field(default=120.0, gt=0)
    """A launched server that says nothing for so long, with requests to answer, is replaced."""
    load: Literal["tensor", "disk", "distributed"] = "tensor"
    """How weights travel: by the request, which points to memory shared with a server on this
    machine; through a folder; or over a process group."""
    bucket_bytes: int = Field(default=256 << 20, ge=1)
    backend: Literal["", "nccl", "gloo"] = ""
    """Of `load: distributed`; empty: gloo on a CPU, else nccl."""


class SglangSettings(Closed):
    """What is run on the machines of a pool, by its `engines.sglang`: no job has a say in it."""

    python: Path = Path(".venv-sglang/bin/python")
    """Interpreter of the environment that SGLang is installed in."""
    module: str = MODULE
    args: tuple[str, ...] = ()
    """Further flags of the server, such as `--attention-backend=fa3`."""
    environment: dict[str, str] = Field(default={})
    """Further variables of its process."""
    url: str = ""
    """A server that someone else runs; none is launched then."""
    api_key: SecretStr = Field(default=SecretStr(""), repr=False)
    shared_memory: bool | None = None
    """Whether the server sees this machine's memory; null: a launched one does."""
    folder: Path | None = None
    """Of `load: disk`; null: tmpfs, with a launched server."""
