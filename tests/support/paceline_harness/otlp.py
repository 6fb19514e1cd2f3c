"""A trace receiver for tests: a real OTLP/gRPC server that stores spans."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services

from paceline_harness.patience import PATIENCE_S


@dataclass(frozen=True, slots=True)
class Received:
    """A span as received; times in nanoseconds, ids in hexadecimal digits."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    service: str
    worker: str
    error: str
    is_call: bool  # kind client
    attributes: dict[str, Any] = field(default_factory=dict[str, Any])
    events: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()  # (trace, span)


class Collector(services.TraceServiceServicer):
    """Serves on a loopback port from `start` to `stop`."""

    def __init__(self, port: int = 0) -> None:
        self.headers: dict[str, str] = {}
        self._port = port
        self._messages: list[Any] = []  # parsed later, so that receiving hardly delays the sender
        self._spans: list[Received] = []
        self._news = threading.Condition()
        self._server: grpc.Server | None = None

    @property
    def endpoint(self) -> str:
        """The endpoint for the settings of services."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Serve, on the same port again after a `stop`."""
        self._server = grpc.server(ThreadPoolExecutor(4))
        services.add_TraceServiceServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        self._server.start()

    def stop(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.stop(0).wait()

    def __enter__(self) -> Collector:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def Export(self, request: Any, context: Any) -> Any:
        """Store a batch."""
        with self._news:
            self.headers = {str(k): str(v) for k, v in context.invocation_metadata()}
            self._messages.append(request)
            self._news.notify_all()
        return pb.ExportTraceServiceResponse()

    def spans(self) -> list[Received]:
        """All spans so far."""
        with self._news:
            return list(self._read())

    def traces(self) -> dict[str, list[Received]]:
        """All spans so far by trace, ordered by start time."""
        found: defaultdict[str, list[Received]] = defaultdict(list)
        for span in sorted(self.spans(), key=lambda each: each.start_ns):
            found[span.trace_id].append(span)
        return dict(found)

    def wait(
        self, enough: Callable[[list[Received]], bool], *, timeout_s: float = PATIENCE_S
    ) -> None:
        """Wait until the spans received satisfy `enough`.

        Raises:
            TimeoutError: not in time; the message lists the spans received.
        """
        deadline = time.monotonic() + timeout_s
        with self._news:
            while not enough(self._read()):
                if not self._news.wait(max(deadline - time.monotonic(), 0)):
                    names = sorted({span.name for span in self._spans})
                    raise TimeoutError(f"{len(self._spans)} spans came: {names}")

    def _read(self) -> list[Received]:
        for message in self._messages:
            self._spans += [
                _received(span, _plain(each.resource.attributes))
                for each in message.resource_spans
                for scope in each.scope_spans
                for span in scope.spans
            ]
        self._messages.clear()
        return self._spans


def below(parent: Received, spans: Iterable[Received]) -> list[Received]:
    """Children of a span."""
    return [span for span in spans if span.parent_id == parent.span_id]


def gaps(trace: Sequence[Received], root: Received) -> list[tuple[float, str, str]]:
    """Intervals not explained by any span, longest first.

    Each is given by its share of the root's duration and the spans before and after it. A span with
    children does not fill the gaps between them, unless it is a call to another process, where the
    rest is transit time.
    """
    parents = {span.parent_id for span in trace}
    leaves = [span for span in trace if span.is_call or span.span_id not in parents]
    leaves = sorted((s for s in leaves if s is not root), key=lambda span: span.start_ns)
    length = max(root.end_ns - root.start_ns, 1)
    found: list[tuple[float, str, str]] = []
    reached, last = root.start_ns, "begin"
    for span in leaves:
        if span.start_ns > reached:
            found.append(((min(span.start_ns, root.end_ns) - reached) / length, last, span.name))
        if span.end_ns > reached:
            reached, last = span.end_ns, span.name
    found.append((max(root.end_ns - reached, 0) / length, last, "end"))
    return sorted(found, reverse=True)


def _received(span: Any, resource: dict[str, Any]) -> Received:
    return Received(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        service=resource["service.name"],
        worker=resource["service.instance.id"],
        error=span.status.message,
        is_call=span.kind == span.SPAN_KIND_CLIENT,
        attributes=_plain(span.attributes),
        events=tuple(event.name for event in span.events),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
