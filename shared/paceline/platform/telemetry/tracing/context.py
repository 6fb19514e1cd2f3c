"""Derives trace ids, span ids and sampling decisions from the ids of groups, episodes and steps.

Every service computes the same result without asking another one, also after a restart or a retry:
all attempts at an episode share one trace and one sampling decision.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from typing import NamedTuple

_HALF = 1 << 64
_W3C = re.compile(
    r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:;sent=([0-9]{1,20}))?"
)


class SpanContext(NamedTuple):
    """Identifies a span by its trace id (128 bits) and its span id (64 bits)."""

    trace: int
    span: int

    @property
    def trace_id(self) -> str:
        """The trace id as tools show it: 32 hexadecimal digits."""
        return f"{self.trace:032x}"


def episode_context(group_id: str, index: int) -> SpanContext:
    """The root span of an episode's trace; all attempts share it.

    The second half of the trace id depends only on the group and decides about sampling, so the
    episodes of a group are kept or dropped together.
    """
    trace = (_hash("episode", group_id, index) << 64) | _hash("group", group_id)
    return SpanContext(trace, _hash("root", group_id, index))


@lru_cache(maxsize=1 << 14)  # called at every change of every group
def group_sampled(group_id: str, share: float) -> bool:
    """Whether the traces of a group's episodes are kept."""
    return sampled(_hash("group", group_id), share)


def step_context(job_id: str, incarnation: int, step: int) -> SpanContext:
    """The root span of the trace of the optimiser step that produced `step`, and of its weights."""
    parts = (job_id, incarnation, step)
    return SpanContext((_hash("step", *parts) << 64) | _hash("job", *parts), _hash("root", *parts))


def derived(context: SpanContext, *parts: object) -> SpanContext:
    """A span of the same trace with an id derived from `parts`, so it survives a restart."""
    return SpanContext(context.trace, _hash(context.trace, *parts))


def sampled(trace: int, share: float) -> bool:
    """Whether a trace is kept, by its last 64 bits as in OpenTelemetry's `TraceIdRatioBased`."""
    return trace % _HALF < round(share * _HALF)


def traceparent(context: SpanContext) -> str:
    """The W3C `traceparent` of a span in a sampled trace."""
    return f"00-{context.trace:032x}-{context.span:016x}-01"


def parse(text: str) -> tuple[SpanContext, int] | None:
    """Parse a `traceparent` into the span and the time it was sent in nanoseconds (0: unknown).

    None if the text is empty or malformed, or if the trace is not sampled.
    """
    if not text:
        return None
    match = _W3C.fullmatch(text)
    if match is None or text.startswith("ff") or not int(match[3], 16) & 1:
        return None
    context = SpanContext(int(match[1], 16), int(match[2], 16))
    return (context, int(match[4] or 0)) if context.trace and context.span else None


def _hash(*parts: object) -> int:
    """A 64-bit hash that is never zero, which is not a valid id."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") or 1
