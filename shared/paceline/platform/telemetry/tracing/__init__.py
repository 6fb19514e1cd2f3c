"""OpenTelemetry traces from prompt to gradient step; imports nothing while tracing is off."""

from paceline.platform.telemetry.tracing.context import (
    SpanContext,
    derived,
    episode_context,
    parse,
    sampled,
    step_context,
    traceparent,
)
from paceline.platform.telemetry.tracing.spans import NOTHING, OFF, Span, Tracer
from paceline.platform.telemetry.tracing.start import start

__all__ = [
    "NOTHING",
    "OFF",
    "Span",
    "SpanContext",
    "Tracer",
    "derived",
    "episode_context",
    "parse",
    "sampled",
    "start",
    "step_context",
    "traceparent",
]
