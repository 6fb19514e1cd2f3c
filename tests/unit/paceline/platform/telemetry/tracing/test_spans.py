import sys
from io import StringIO

import pytest

from paceline.platform.telemetry import logs
from paceline.platform.telemetry.tracing import (
    NOTHING,
    OFF,
    Span,
    Tracer,
    episode_context,
    traceparent,
)

ROOT = episode_context("job.1", 0)


class Kept:
    """A tracer on a fake clock, and its finished spans."""

    def __init__(self, share: float = 1.0) -> None:
        self.now = 1000
        self.spans: list[Span] = []
        ids = iter(range(1, 1000))
        self.tracer = Tracer(
            take=self.spans.append, share=share, clock=lambda: self.now, new_id=lambda: next(ids)
        )


def test_a_block_is_a_span() -> None:
    kept = Kept()
    with kept.tracer.root("episode", ROOT, job="a") as root:
        kept.now += 5
        with root.child("generate", {"gen_ai.x": 1}, turn=0) as child:
            child.set(tokens=3)
            child.event("swap", version=2)
            kept.now += 7
    child, root = kept.spans
    assert (child.name, child.start_ns, child.end_ns, child.parent) == (
        "generate",
        1005,
        1012,
        ROOT,
    )
    assert child.attributes == {"gen_ai.x": 1, "turn": 0, "tokens": 3}
    assert child.events == [("swap", 1005, {"version": 2})]
    assert (root.context, root.parent, root.end_ns, root.error) == (ROOT, None, 1012, "")


def test_an_error_that_ends_a_block_is_recorded() -> None:
    kept = Kept()
    with pytest.raises(ZeroDivisionError), kept.tracer.root("episode", ROOT):
        raise ZeroDivisionError("by none")
    assert kept.spans[0].error == "ZeroDivisionError: by none"


def test_the_first_end_counts_and_is_never_before_the_start() -> None:
    kept = Kept()
    span = kept.tracer.root("episode", ROOT)
    kept.now -= 500
    span.end(error="first")
    span.end(error="second")
    assert [(s.error, s.end_ns) for s in kept.spans] == [("first", 1000)]


def test_a_past_span_is_recorded_in_one_call() -> None:
    kept = Kept()
    kept.tracer.root("episode", ROOT).past("queue", 10, 30, why="full")
    (span,) = kept.spans
    assert (span.start_ns, span.end_ns, span.attributes) == (10, 30, {"why": "full"})


def test_a_message_carries_its_span_and_its_transit_is_recorded() -> None:
    sender, receiver = Kept(), Kept()
    span = sender.tracer.root("ask", ROOT)
    receiver.now += 40
    receiver.tracer.received(span.sent).child("rollout").end()
    transit, rollout = receiver.spans
    assert (transit.name, transit.start_ns, transit.end_ns) == ("transit", 1000, 1040)
    assert transit.parent == rollout.parent == ROOT
    assert receiver.tracer.received(traceparent(ROOT))
    assert len(receiver.spans) == 2  # without the time of sending


@pytest.mark.parametrize("text", ["", "nonsense", "00-00-00-01"])
def test_a_message_without_a_trace_has_no_span(text: str) -> None:
    kept = Kept()
    with kept.tracer.received(text).child("rollout") as span:
        assert span is NOTHING
    assert not kept.spans


def test_an_unsampled_span_has_no_children_and_records_nothing() -> None:
    with NOTHING.child("a", tokens=1).child("b", {"c.d": 1}) as span:
        span.set(x=1)
        span.event("y")
        span.past("z", 1)
        span.end(error="w")
        assert not span
        assert (span.traceparent, span.sent) == ("", "")
        assert logs.trace.get() == 0
    assert not NOTHING.attributes
    assert not NOTHING.events
    for span in (OFF.root("a", ROOT), OFF.below(ROOT), OFF.received(traceparent(ROOT))):
        assert span is NOTHING
    assert not OFF.keeps("g")


def test_events_inside_a_block_name_its_trace() -> None:
    import logging

    stream = StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.EventFormatter())
    logger = logging.getLogger("traced")
    logger.addHandler(handler)
    with Kept().tracer.root("episode", ROOT):
        logs.Log("traced").warning("gives back", job="a")
    logs.Log("traced").warning("gives back", job="b")
    logger.removeHandler(handler)
    inside, outside = stream.getvalue().splitlines()
    assert inside.endswith(f"gives back job=a trace={ROOT.trace_id}")
    assert outside.endswith("gives back job=b")


def test_without_settings_nothing_is_imported() -> None:
    import subprocess

    code = (
        "import sys; from paceline.platform.server import chassis; "
        "from paceline.platform.telemetry.tracing import start; "
        "print([m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
