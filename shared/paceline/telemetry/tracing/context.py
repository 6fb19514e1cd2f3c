"""Names of traces and spans, and which traces are kept: functions of ids, the same everywhere.

No service has to ask another one: a restart, a retry and every attempt at an episode find the same
trace and the same decision.
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


class Context(NamedTuple):
    """A span by its numbers: of the trace (128 bits) and of its own (64 bits)."""

    trace: int
    span: int

    @property
    def trace_id(self) -> str:
        """Of the trace, as tools show it: 32 hexadecimal digits."""
        return f"{self.trace:032x}"


def episode_context(group_id: str, index: int) -> Context:
    """The root of an episode's trace; all attempts share it.

    The second half of the trace id is the group's: it decides what is sampled, so the episodes
    that are compared with each other are kept together.
    """
    trace = (_hash("episode", group_id, index) << 64) | _hash("group", group_id)
    return Context(trace, _hash("root", group_id, index))


@lru_cache(maxsize=1 << 14)  # asked at every change of every group
def group_sampled(group_id: str, share: float) -> bool:
    """Whether the traces of a group's episodes are kept."""
    return sampled(_hash("group", group_id), share)


def step_context(job_id: str, incarnation: int, step: int) -> Context:
    """The root of the trace of the optimiser step that led to `step`, and of its weights."""
    parts = (job_id, incarnation, step)
    return Context((_hash("step", *parts) << 64) | _hash("job", *parts), _hash("root", *parts))


def derived(context: Context, *parts: object) -> Context:
    """A span of the same trace that is known by name, before and after a restart."""
    return Context(context.trace, _hash(context.trace, *parts))


def sampled(trace: int, share: float) -> bool:
    """Whether a trace is kept: by its last 64 bits, as OpenTelemetry's `TraceIdRatioBased` does."""
    return trace % _HALF < round(share * _HALF)


def traceparent(context: Context) -> str:
    """As W3C Trace Context writes a span of a trace that is kept."""
    return f"00-{context.trace:032x}-{context.span:016x}-01"


def parse(text: str) -> tuple[Context, int] | None:
    """From a `traceparent`: the span, and when it was sent in nanoseconds (0: unknown).

    None if the text is empty, malformed or of a trace that is not kept.
    """
    if not text:
        return None
    found = _W3C.fullmatch(text)
    if found is None or text.startswith("ff") or not int(found[3], 16) & 1:
        return None
    context = Context(int(found[1], 16), int(found[2], 16))
    return (context, int(found[4] or 0)) if context.trace and context.span else None


def _hash(*parts: object) -> int:
    """64 bits that are never all zero, which no id may be."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") or 1
