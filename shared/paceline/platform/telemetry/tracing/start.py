"""Builds the tracer that a process's settings ask for."""

from __future__ import annotations

from paceline.config.service import ServiceSettings
from paceline.errors import ConfigError
from paceline.errors.extras import not_installed
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.telemetry.tracing.spans import OFF, Tracer


def start(settings: ServiceSettings, metrics: Metrics) -> Tracer:
    """Off unless `tracing` is set; OpenTelemetry is imported only then.

    Raises:
        ConfigError: the `tracing` extra is not installed, or a file that it names is missing.
    """
    if settings.tracing is None:
        return OFF
    try:
        from paceline.platform.telemetry.tracing.export import Pipeline
    except ImportError as error:
        what = not_installed(error, extra="tracing")
        raise ConfigError(f"tracing: {what}, or remove it") from None
    pipeline = Pipeline(settings.tracing, process=settings, metrics=metrics)
    return Tracer(take=pipeline.put, share=settings.tracing.sample, close=pipeline.close)
