"""Ended spans to an OTLP endpoint, in a thread of OpenTelemetry's own. Nobody waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from paceline import __version__
from paceline.config.service import ServiceSettings, TracingSettings
from paceline.errors import ConfigError
from paceline.logs import Log
from paceline.metrics import Metrics
from paceline.tracing.context import Context
from paceline.tracing.spans import Span, Value

_SCOPE = InstrumentationScope("paceline", __version__)
_KEPT = TraceFlags(TraceFlags.SAMPLED)
_KINDS = {"client": SpanKind.CLIENT, "server": SpanKind.SERVER}
log = Log("tracing")


class Counted(SpanExporter):
    """Counts what was sent and what was lost; says once that the endpoint is away."""

    def __init__(self, inner: SpanExporter, *, endpoint: str, metrics: Metrics) -> None:
        self.handed = 0
        self._inner = inner
        self._endpoint = endpoint
        self._metrics = metrics
        self._away = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch; called by one thread."""
        self.handed += len(spans)
        result = self._inner.export(spans)
        sent = result is SpanExportResult.SUCCESS
        self._metrics.add("spans", len(spans), outcome="sent" if sent else "failed")
        if self._away is sent:
            self._away = not sent
            if sent:
                log.info("traces are taken again", endpoint=self._endpoint)
            else:
                log.warning("traces are not taken and get lost", endpoint=self._endpoint)
        return result

    def shutdown(self) -> None:
        """Let go of the connection."""
        self._inner.shutdown()


class Pipeline:
    """A bounded queue in front of the exporter; what does not fit is counted and forgotten."""

    def __init__(
        self, settings: TracingSettings, *, process: ServiceSettings, metrics: Metrics
    ) -> None:
        # Its messages repeat for as long as the endpoint is away; `Counted` says it once.
        for name in ("opentelemetry.exporter", "opentelemetry.sdk"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._metrics = metrics
        self._most = settings.queue
        self._put = 0
        self._resource = Resource(
            {
                "service.name": f"paceline-{process.kind}",
                "service.namespace": "paceline",
                "service.instance.id": process.worker_id,
                "service.version": __version__,
                "paceline.site": process.site,
            }
        )
        self._exporter = Counted(_exporter(settings), endpoint=settings.endpoint, metrics=metrics)
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=settings.queue,
            schedule_delay_millis=settings.every_s * 1e3,
            max_export_batch_size=min(settings.batch, settings.queue),
            export_timeout_millis=settings.timeout_s * 1e3,
        )

    def put(self, span: Span) -> None:
        """Queue a span that has ended."""
        if self._put - self._exporter.handed >= self._most:
            self._metrics.add("spans", outcome="dropped")
            return
        self._put += 1
        self._processor.on_end(readable(span, self._resource))

    def close(self, timeout_s: float) -> None:
        """Send what is left; what takes longer than `timeout_s` is lost."""
        # The processor's own limit is half a minute.
        last = threading.Thread(target=self._processor.shutdown, name="last spans", daemon=True)
        last.start()
        last.join(timeout_s)


def readable(span: Span, resource: Resource) -> ReadableSpan:
    """As OpenTelemetry's exporters want it; the attribute `kind` becomes the span's kind."""
    attributes = dict(span.attributes)
    kind = _KINDS.get(str(attributes.pop("kind", "")), SpanKind.INTERNAL)
    return ReadableSpan(
        name=span.name,
        context=_context(span.context),
        parent=None if span.parent is None else _context(span.parent),
        resource=resource,
        attributes=_named(attributes),
        events=[Event(name, _named(more), at) for name, at, more in span.events],
        links=[Link(_context(link)) for link in span.links],
        kind=kind,
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=_SCOPE,
    )


def _named(attributes: dict[str, Value]) -> dict[str, Value]:
    return {
        name if "." in name else f"paceline.{name}": value for name, value in attributes.items()
    }


def _context(context: Context) -> SpanContext:
    return SpanContext(context.trace, context.span, is_remote=False, trace_flags=_KEPT)


def _exporter(settings: TracingSettings) -> OTLPSpanExporter:
    secure = settings.endpoint.startswith("https://")
    credentials: Any = None
    if secure:
        authority = None if settings.authority is None else _read(settings.authority, "authority")
        credentials = grpc.ssl_channel_credentials(authority)
    return OTLPSpanExporter(
        endpoint=settings.endpoint,
        insecure=not secure,
        credentials=credentials,
        headers=headers(settings.headers_file),
        timeout=settings.timeout_s,
        compression=grpc.Compression.Gzip,
    )


def headers(path: Path | None) -> tuple[tuple[str, str], ...]:
    """`name: value` lines of a file, as gRPC metadata; empty lines and `#` are skipped.

    Raises:
        ConfigError: the file cannot be read or has other lines; its content is not told.
    """
    if path is None:
        return ()
    found: list[tuple[str, str]] = []
    for number, line in enumerate(_read(path, "headers_file").decode().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise ConfigError(f"tracing.headers_file: line {number} of {path}: not `name: value`")
        found.append((name.strip().lower(), value.strip()))
    return tuple(found)


def _read(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"tracing.{field}: cannot read {path}: {error.strerror}") from None
