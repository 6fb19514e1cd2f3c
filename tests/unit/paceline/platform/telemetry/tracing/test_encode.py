"""Compares encoded spans with those of OpenTelemetry's own encoder."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope as Scope
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from paceline.platform.telemetry.tracing import Span, Tracer
from paceline.platform.telemetry.tracing import SpanContext as Context
from paceline.platform.telemetry.tracing.encode import request_of, resource_of

KINDS = {"client": SpanKind.CLIENT, "server": SpanKind.SERVER}
TRACER = Tracer(take=lambda _: None, share=1.0)
PROCESS = {"service.name": "paceline-reward", "paceline.site": ""}

texts = st.text(max_size=8)
whole = st.integers(-(1 << 63), (1 << 63) - 1)
numbers = st.floats(allow_nan=False)
contexts = st.builds(Context, st.integers(1, (1 << 128) - 1), st.integers(1, (1 << 64) - 1))
values: st.SearchStrategy[Any] = st.one_of(
    texts, whole, st.booleans(), numbers, st.lists(texts), st.lists(whole), st.lists(numbers)
)
attributes = st.dictionaries(texts.filter(lambda name: name != "kind"), values, max_size=4)
moments = st.integers(0, 1 << 62)


@st.composite
def spans(draw: st.DrawFn) -> Span:
    parent = draw(st.none() | contexts)
    made = Span(draw(texts), draw(contexts), parent, tracer=TRACER, start_ns=draw(moments))
    made.end_ns, made.error = draw(moments), draw(texts)
    made.links = draw(st.lists(contexts, max_size=2))
    made.events = draw(st.lists(st.tuples(texts, moments, attributes), max_size=2))
    made.attributes = draw(attributes) | draw(
        st.sampled_from([{}, *({"kind": kind} for kind in ("client", "server", "other"))])
    )
    return made


def theirs(span: Span) -> ReadableSpan:
    """The same span for OpenTelemetry's encoder."""
    given = {name: value for name, value in span.attributes.items() if name != "kind"}
    return ReadableSpan(
        name=span.name,
        context=context_of(span.context),
        parent=context_of(span.parent) if span.parent else None,
        resource=Resource(PROCESS),
        attributes=named(given),
        events=[Event(name, named(more), at) for name, at, more in span.events],
        links=[Link(context_of(link)) for link in span.links],
        kind=KINDS.get(str(span.attributes.get("kind")), SpanKind.INTERNAL),
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=InstrumentationScope("paceline", "1"),
    )


def context_of(context: Context) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(context.trace, context.span, is_remote=False, trace_flags=flags)


def named(given: dict[str, Any]) -> dict[str, Any]:
    return {name if "." in name else f"paceline.{name}": value for name, value in given.items()}


@given(st.lists(spans(), min_size=1, max_size=3))
def test_spans_are_encoded_as_by_opentelemetry(made: list[Span]) -> None:
    scope = Scope(name="paceline", version="1")
    ours = request_of(made, resource_of(PROCESS), scope)
    wanted = encode_spans([theirs(span) for span in made])
    for span in wanted.resource_spans[0].scope_spans[0].spans:
        if not span.status.code:  # an empty message is equivalent to none
            span.ClearField("status")
    assert ours == wanted
