"""How much memory a job needs, in words: of `validate` and `doctor`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from paceline.config import JobSpec
from paceline.config.precision import with_dtype
from paceline.models.memory import MemoryNeed, needs_of, size_of
from paceline.platform.text import human_bytes

_MAX_FIELDS = 3


def needs(spec: JobSpec) -> list[MemoryNeed]:
    """Memory needs of a job's processes; empty: the model is not on this machine, or unknown."""
    if spec.model.endpoint is not None:
        return []
    size = size_of(Path(spec.model.path))
    return [] if size is None else needs_of(with_dtype(spec, "auto"), size)


def total(needs: Sequence[MemoryNeed]) -> int:
    """Bytes of all processes together."""
    return sum(need.num_bytes for need in needs)


def words(needs: Sequence[MemoryNeed]) -> str:
    """`at most 8.1 GiB: the trainer 4.3 GiB, a rollout worker 1.5 GiB (each of 2), …`."""
    counts = Counter((need.process, need.num_bytes) for need in needs)
    parts = [
        f"{process} {human_bytes(size)}" + (f" (each of {number})" if number > 1 else "")
        for (process, size), number in counts.items()
    ]
    return f"at most {human_bytes(total(needs))}: {', '.join(parts)}"


def lower(needs: Sequence[MemoryNeed]) -> str:
    """The fields that lower it most, with what they lower."""
    parts = {part.lower: part for need in needs for part in need.largest}
    largest = sorted(parts.values(), key=lambda part: -part.num_bytes)[:_MAX_FIELDS]
    return ", ".join(f"{p.lower} ({p.what}: {human_bytes(p.num_bytes)})" for p in largest)


def lines(needs: Sequence[MemoryNeed]) -> list[str]:
    """Lines to print; none if nothing is known."""
    return [f"memory: {words(needs)}", f"lower it with {lower(needs)}"] if needs else []
