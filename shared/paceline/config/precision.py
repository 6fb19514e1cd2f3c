"""What `dtype: auto` in a job means. Imports no torch, as the gateway decides it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from paceline.config.job import JobSpec

Dtype = Literal["auto", "float32", "bfloat16"]
CPUINFO, GPUS = Path("/proc/cpuinfo"), Path("/proc/driver/nvidia/gpus")
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
    """The job with `dtype` wherever it says `auto`; for `auto` itself, what is fast here."""
    parts = {"model": spec.model, "trainer": spec.trainer}
    if all(part.dtype != "auto" for part in parts.values()):
        return spec
    chosen = {"dtype": fast_dtype() if dtype == "auto" else dtype}
    changed = {
        name: part.model_copy(update=chosen) for name, part in parts.items() if part.dtype == "auto"
    }
    return spec.model_copy(update=changed)
