"""Spans and their tracer. A span of an unsampled trace is `NOTHING`, which costs nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import Token
from typing import Any, Self

from paceline.platform.telemetry import logs
from paceline.platform.telemetry.tracing.context import (
    SpanContext,
    group_sampled,
    parse,
    traceparent,
)

Value = str | int | float | bool | Sequence[str] | Sequence[int] | Sequence[float]
Take = Callable[["Span"], None]


class Span:
    """An operation that takes time. As a context manager it records the error that ended the block.

    Times are nanoseconds since the epoch. Attributes without a dot in their name get the prefix
    `paceline.` when they are sent.
    """

    __slots__ = (
        "_token",
        "_tracer",
        "attributes",
        "context",
        "end_ns",
        "error",
        "events",
        "links",
        "name",
        "parent",
        "start_ns",
    )

    def __init__(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        *,
        tracer: Tracer,
        start_ns: int,
        links: Sequence[SpanContext] = (),
        attributes: dict[str, Value] | None = None,
    ) -> None:
        self.name = name
        self.context = context
        self.parent = parent
        self.start_ns = start_ns
        self.end_ns = 0
        self.links = links
        self.attributes = attributes or {}
        self.events: list[tuple[str, int, dict[str, Value]]] = []
        self.error = ""
        self._tracer = tracer
        self._token: Token[int] | None = None

    def __bool__(self) -> bool:
        return True

    @property
    def traceparent(self) -> str:
        """The W3C `traceparent` of this span; empty if it is not sampled."""
        return traceparent(self.context)

    @property
    def sent(self) -> str:
        """The `traceparent` and current time to send with a message; see `Tracer.received`."""
        return f"{self.traceparent};sent={self._tracer.now()}"

    def child(
        self,
        name: str,
        given: Mapping[str, Value] | None = None,
        *,
        context: SpanContext | None = None,
        start_ns: int = 0,
        links: Sequence[SpanContext] = (),
        **attributes: Value,
    ) -> Span:
        """Start a child span, now or at `start_ns`; `given` holds more attributes."""
        tracer = self._tracer
        return Span(
            name,
            context or SpanContext(self.context.trace, tracer.new_id()),
            self.context,
            tracer=tracer,
            start_ns=start_ns or tracer.now(),
            links=links,
            attributes={**(given or {}), **attributes},
        )

    def past(self, name: str, start_ns: int, end_ns: int = 0, **attributes: Value) -> None:
        """Record a child span that has already ended, now or at `end_ns`."""
        span = self.child(name, start_ns=start_ns)
        span.set(**attributes)
        span.end(end_ns=end_ns)

    def set(self, **attributes: Value) -> None:
        """Set attributes."""
        self.attributes.update(attributes)

    def event(self, name: str, **attributes: Value) -> None:
        """Add an event at the current time."""
        self.events.append((name, self._tracer.now(), attributes))

    def end(self, *, error: str = "", end_ns: int = 0) -> None:
        """End the span; later calls have no effect."""
        if not self.end_ns:
            self.error = error or self.error
            # A clock that was set back must not give negative durations.
            self.end_ns = max(end_ns or self._tracer.now(), self.start_ns)
            self._tracer.take(self)

    def __enter__(self) -> Self:
        self._token = logs.trace.set(self.context.trace)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: Any
    ) -> None:
        if self._token is not None:
            logs.trace.reset(self._token)
        text = "" if kind is None else f"{kind.__name__}: {error}".removesuffix(": ")
        self.end(error=text)


class _Nothing(Span):
    """A span that records nothing."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__("", SpanContext(0, 0), None, tracer=OFF, start_ns=0)

    def __bool__(self) -> bool:
        return False

    @property
    def traceparent(self) -> str:
        return ""

    @property
    def sent(self) -> str:
        return ""

    def child(self, name: str, given: Mapping[str, Value] | None = None, **_: Any) -> Span:
        return self

    def past(self, name: str, start_ns: int, end_ns: int = 0, **attributes: Value) -> None:
        pass

    def set(self, **attributes: Value) -> None:
        pass

    def event(self, name: str, **attributes: Value) -> None:
        pass

    def end(self, *, error: str = "", end_ns: int = 0) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: Any
    ) -> None:
        pass


class Tracer:
    """Creates the spans of a process; passes each to `take`, which must not block, when it ends."""

    def __init__(
        self,
        *,
        take: Take,
        share: float,
        clock: Callable[[], int] = time.time_ns,
        new_id: Callable[[], int] = lambda: random.getrandbits(64) or 1,
        close: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.take = take
        self.share = share
        self.now = clock
        self.new_id = new_id
        self._close = close

    def __bool__(self) -> bool:
        """Whether tracing is on."""
        return True

    def keeps(self, group_id: str) -> bool:
        """Whether the traces of a group's episodes are kept."""
        return group_sampled(group_id, self.share)

    def root(
        self, name: str, context: SpanContext, *, start_ns: int = 0, **attributes: Value
    ) -> Span:
        """Start the root span of a trace."""
        start_ns = start_ns or self.now()
        return Span(name, context, None, tracer=self, start_ns=start_ns, attributes=attributes)

    def below(self, parent: SpanContext | None) -> Span:
        """A stand-in for a span of another process, to add children to; `NOTHING` for None."""
        return NOTHING if parent is None else Span("", parent, None, tracer=self, start_ns=1)

    def received(self, trace: str, at_ns: int = 0) -> Span:
        """The sender's span, from `Span.sent`; records the transit of the message as its child."""
        parsed = parse(trace)
        if parsed is None:
            return NOTHING
        context, sent_ns = parsed
        span = self.below(context)
        # Clocks of two machines may disagree by more than a message takes.
        if sent_ns:
            span.past("transit", sent_ns, at_ns)
        return span

    def close(self, timeout_s: float) -> None:
        """Export what is queued, within `timeout_s`."""
        self._close(timeout_s)


class _Off(Tracer):
    """A tracer that keeps nothing."""

    def __init__(self) -> None:
        super().__init__(take=lambda _: None, share=0.0, clock=lambda: 0)

    def __bool__(self) -> bool:
        return False

    def keeps(self, group_id: str) -> bool:
        return False

    def root(
        self, name: str, context: SpanContext, *, start_ns: int = 0, **attributes: Value
    ) -> Span:
        return NOTHING

    def below(self, parent: SpanContext | None) -> Span:
        return NOTHING

    def received(self, trace: str, at_ns: int = 0) -> Span:
        return NOTHING


OFF: Tracer = _Off()
NOTHING: Span = _Nothing()
