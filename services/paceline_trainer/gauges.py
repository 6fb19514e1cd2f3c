"""Prometheus metrics of a rank: where its time goes, and how well it uses its device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.platform.telemetry.metrics import Metrics
from paceline_trainer.columns import Share

PHASES = ("waiting", "stepping", "checkpointing", "publishing")
WORK = ("stepping", "checkpointing", "publishing")
# FLOP/s of dense bfloat16 matrix products, from NVIDIA's data sheets; the first match counts.
PEAKS: tuple[tuple[str, float], ...] = (
    ("B200", 2250e12),
    ("H200", 989e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A10", 125e12),
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The properties of a model that determine its floating point operations."""

    parameters: int  # of matrix products: without the input embedding unless the output uses it
    layers: int
    width: int  # heads times size of a head

    def flops(self, lengths: Iterable[int]) -> float:
        """FLOPs to train once on sequences of these lengths, forward and backward.

        6 N per token and 12 L H Q T for attention over a context of T (PaLM, arXiv 2204.02311,
        appendix B); recomputation and padding do not count. A prompt counts for each of its
        sequences, though it is computed once for all of them.
        """
        return float(
            sum(n * (6 * self.parameters + 12 * self.layers * self.width * n) for n in lengths)
        )


def shape_of(config: Any, *, parameters: int, tied: bool) -> ModelShape:
    """The shape of a model, from its Hugging Face text config and its number of parameters."""
    heads = int(config.num_attention_heads)
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    embedding = 0 if tied else int(config.vocab_size) * int(config.hidden_size)
    return ModelShape(parameters - embedding, int(config.num_hidden_layers), heads * int(size))


def peak_of(device: str, dtype: str) -> float | None:
    """Peak FLOP/s of a device in this dtype; None if it is unknown."""
    if dtype not in ("bfloat16", "float16"):
        return None
    return next((peak for name, peak in PEAKS if name in device), None)


class TrainerGauges:
    """The metrics of one rank; rank 0 also exports those of the whole job."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        job_id: str,
        seconds: Callable[[], dict[str, float]],
        shape: ModelShape,
        peak: float | None,
    ) -> None:
        """`seconds` returns those since the start by phase; `peak` is the device's FLOP/s."""
        self._metrics = metrics
        self._job_id = job_id
        self._seconds = seconds
        self._shape = shape
        self._peak = peak
        self._stepping_s = 0.0

    def busy_s(self) -> float:
        """Seconds of work since the start."""
        found = self._seconds()
        return sum(found.get(phase, 0.0) for phase in WORK)

    def damaged(self, checkpoints: int) -> None:
        """Set the number of damaged checkpoints that were skipped at the start."""
        self._metrics.set("damaged_checkpoints", checkpoints, job=self._job_id)

    def show(self) -> None:
        """Export seconds by phase, and the device's memory."""
        found = self._seconds()
        for phase in PHASES:
            seconds = found.get(phase, 0.0)
            self._metrics.total("phase_seconds", seconds, job=self._job_id, phase=phase)
        if torch.cuda.is_initialized():
            self._memory("allocated", torch.cuda.memory_allocated())
            self._memory("peak", torch.cuda.max_memory_allocated())

    def stepped(self, share: Share, metrics: Mapping[str, float], *, first: bool) -> None:
        """Export a step; `metrics` are of all ranks, `share` is what this rank trained on."""
        if first:
            self._metrics.add("rank_tokens", metrics["tokens"], job=self._job_id)
            self._metrics.add("fed_tokens", metrics["fed_tokens"], job=self._job_id)
        now = self._seconds().get("stepping", 0.0)
        duration_s, self._stepping_s = now - self._stepping_s, now
        if self._peak and duration_s > 0:
            lengths = (len(s.tokens) for s in share.samples if s.logprobs and not s.masked)
            ratio = self._shape.flops(lengths) / (duration_s * self._peak)
            self._metrics.set("mfu", ratio, job=self._job_id)
        self.show()

    def _memory(self, name: str, num_bytes: int) -> None:
        self._metrics.set("memory", num_bytes, job=self._job_id, memory=name)
