"""Ended spans to an OTLP endpoint, in a thread of OpenTelemetry's own. Nobody waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags

from paceline import __version__
from paceline.config.service import ServiceSettings, TracingSettings
from paceline.errors import ConfigError
from paceline.logs import Log
from paceline.metrics import Metrics
from paceline.tracing.encode import request_of, resource_of
from paceline.tracing.spans import Span

_SCOPE = InstrumentationScope(name="paceline", version=__version__)
log = Log("tracing")


class _Ended(ReadableSpan):
    """Takes a span of ours through OpenTelemetry's queue, which asks only whether it is kept."""

    _context = SpanContext(1, 1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def __init__(self, span: Span) -> None:
        self.span = span


class _Exporter(OTLPSpanExporter):
    """OpenTelemetry's, with an encoder of our own."""

    def __init__(self, attributes: Mapping[str, str], **options: Any) -> None:
        super().__init__(**options)
        self._process = resource_of(attributes)

    def _translate_data(self, data: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
        spans = [each.span for each in data if isinstance(each, _Ended)]
        return request_of(spans, self._process, _SCOPE)


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
        attributes = {
            "service.name": f"paceline-{process.kind}",
            "service.namespace": "paceline",
            "service.instance.id": process.worker_id,
            "service.version": __version__,
            "paceline.site": process.site,
        }
        inner = _Exporter(attributes, **_options(settings))
        self._exporter = Counted(inner, endpoint=settings.endpoint, metrics=metrics)
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
        self._processor.on_end(_Ended(span))

    def close(self, timeout_s: float) -> None:
        """Send what is left; what takes longer than `timeout_s` is lost."""
        # The processor's own limit is half a minute.
        last = threading.Thread(target=self._processor.shutdown, name="last spans", daemon=True)
        last.start()
        last.join(timeout_s)


def _options(settings: TracingSettings) -> dict[str, Any]:
    secure = settings.endpoint.startswith("https://")
    credentials: Any = None
    if secure:
        authority = None if settings.authority is None else _read(settings.authority, "authority")
        credentials = grpc.ssl_channel_credentials(authority)
    return {
        "endpoint": settings.endpoint,
        "insecure": not secure,
        "credentials": credentials,
        "headers": headers(settings.headers_file),
        "timeout": settings.timeout_s,
        "compression": grpc.Compression.Gzip,
    }


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
