"""Exports finished spans to an OTLP endpoint from a background thread that nothing waits for."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.sdk.trace.export import SpanExportResult

from paceline import __version__
from paceline.config.service import ServiceSettings, TracingSettings
from paceline.errors import ConfigError
from paceline.platform.proxies import DIRECT, is_loopback
from paceline.platform.telemetry.logs import Log
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.telemetry.tracing.encode import request_of, resource_of
from paceline.platform.telemetry.tracing.spans import Span

_SCOPE = InstrumentationScope(name="paceline", version=__version__)
log = Log("tracing")


class _Exporter(OTLPSpanExporter):
    """OpenTelemetry's exporter with our own encoder."""

    def __init__(self, attributes: Mapping[str, str], **options: Any) -> None:
        super().__init__(**options)
        self._process = resource_of(attributes)

    def _translate_data(self, data: Sequence[Any]) -> ExportTraceServiceRequest:
        return request_of(data, self._process, _SCOPE)


class Pipeline:
    """A bounded queue and the thread that exports from it; spans that do not fit are dropped.

    The outcome of each span is counted. An outage of the endpoint is logged once.
    """

    def __init__(
        self, settings: TracingSettings, *, process: ServiceSettings, metrics: Metrics
    ) -> None:
        # The exporter would log the same message throughout an outage of the endpoint.
        for name in ("opentelemetry.exporter", "opentelemetry.sdk"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._settings = settings
        self._metrics = metrics
        self._waiting: deque[Span] = deque()
        self._batch = min(settings.batch, settings.queue)
        self._enough = threading.Event()
        self._closing = False
        self._away = False
        attributes = {
            "service.name": f"paceline-{process.kind}",
            "service.namespace": "paceline",
            "service.instance.id": process.worker_id,
            "service.version": __version__,
            "paceline.site": process.site,
        }
        self._exporter = _Exporter(attributes, **_options(settings))
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def put(self, span: Span) -> None:
        """Queue a finished span."""
        if len(self._waiting) >= self._settings.queue:
            self._metrics.add("spans", outcome="dropped")
            return
        self._waiting.append(span)
        if len(self._waiting) == self._batch:
            self._enough.set()

    def close(self, timeout_s: float) -> None:
        """Export what is queued; spans not sent within `timeout_s` are lost."""
        self._closing = True
        self._enough.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        closing = False
        while not closing:
            self._enough.wait(self._settings.every_s)
            self._enough.clear()
            closing = self._closing  # read first, so that the last flush sends all earlier spans
            try:
                self._flush()
            except Exception:  # the supervisor boundary of one export
                log.exception("spans lost")
        self._exporter.shutdown()

    def _flush(self) -> None:
        while self._waiting:
            size = min(self._batch, len(self._waiting))
            self._send([self._waiting.popleft() for _ in range(size)])

    def _send(self, spans: Sequence[Any]) -> None:
        sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
        self._metrics.add("spans", len(spans), outcome="sent" if sent else "failed")
        if self._away is sent:
            self._away = not sent
            if sent:
                log.info("exporting traces again", endpoint=self._settings.endpoint)
            else:
                log.warning("cannot export traces", endpoint=self._settings.endpoint)


def _options(settings: TracingSettings) -> dict[str, Any]:
    secure = settings.endpoint.startswith("https://")
    host = urlsplit(settings.endpoint).hostname or ""
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
        "channel_options": (DIRECT,) if is_loopback(host) else None,
    }


def headers(path: Path | None) -> tuple[tuple[str, str], ...]:
    """Parse `name: value` lines of a file as gRPC metadata; skips empty lines and comments (`#`).

    Raises:
        ConfigError: the file cannot be read or has other lines; the message never quotes them.
    """
    if path is None:
        return ()
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(_read(path, "headers_file").decode().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise ConfigError(f"tracing.headers_file: line {number} of {path}: not `name: value`")
        pairs.append((name.strip().lower(), value.strip()))
    return tuple(pairs)


def _read(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"tracing.{field}: cannot read {path}: {error.strerror}") from None
