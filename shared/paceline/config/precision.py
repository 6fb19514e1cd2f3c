"""The meaning of `dtype: auto` in a job. Imports no torch, as the gateway decides it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from paceline.config.job import JobSpec

Dtype = Literal["auto", "float32", "bfloat16"]
CPUINFO, GPUS = Path("/proc/cpuinfo"), Path("/proc/driver/nvidia/gpus")
NO_GPUS = Path("/nonexistent")
UNITS = frozenset({"amx_bf16", "avx512_bf16", "bf16", "svebf16"})
"""Flags of processors that multiply bfloat16 in hardware: x86 and Arm. Others emulate it: three
times slower than float32."""


def fast_dtype(*, cpuinfo: Path = CPUINFO, gpus: Path = GPUS) -> Dtype:
    """bfloat16 if this machine has a GPU, or a processor with units for it, else float32."""
    if gpus.is_dir() and any(gpus.iterdir()):
        return "bfloat16"
    if not cpuinfo.is_file():
        return "float32"
    lines = cpuinfo.read_text(errors="replace").splitlines()
    flags = (line.partition(":")[2].split() for line in lines if line[:5] in {"flags", "Featu"})
    return "bfloat16" if UNITS & set(next(flags, ())) else "float32"


def with_dtype(spec: JobSpec, dtype: Dtype) -> JobSpec:
    """The job with `dtype` wherever it says `auto`.

    For `auto` itself, what is fast where the part computes: on this machine's GPUs, unless its
    `devices` are the CPU.
    """
    parts = {
        "model": (spec.model, spec.rollout.devices),
        "trainer": (spec.trainer, spec.trainer.devices),
    }
    changed = {
        name: part.model_copy(update={"dtype": _fast(devices) if dtype == "auto" else dtype})
        for name, (part, devices) in parts.items()
        if part.dtype == "auto"
    }
    return spec.model_copy(update=changed) if changed else spec


def _fast(devices: str) -> Dtype:
    return fast_dtype(gpus=NO_GPUS) if devices == "cpu" else fast_dtype()
