import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from paceline.platform.telemetry.tracing import (
    SpanContext,
    Tracer,
    derived,
    episode_context,
    parse,
    sampled,
    step_context,
    traceparent,
)

GROUPS = st.text(min_size=1, max_size=20)
INDICES = st.integers(0, 1 << 20)
SHARES = st.floats(0, 1)


@given(GROUPS, INDICES, INDICES, SHARES)
def test_a_group_is_sampled_as_a_whole(group: str, a: int, b: int, share: float) -> None:
    one, two = episode_context(group, a), episode_context(group, b)
    kept = Tracer(take=lambda _: None, share=share).keeps(group)
    assert kept == sampled(one.trace, share) == sampled(two.trace, share)
    assert (one == two) == (a == b)


@given(GROUPS, INDICES, SHARES)
def test_sampling_decisions_match_opentelemetry(group: str, index: int, share: float) -> None:
    trace = episode_context(group, index).trace
    theirs = TraceIdRatioBased(share).should_sample(None, trace, "episode").decision
    assert sampled(trace, share) == (theirs is Decision.RECORD_AND_SAMPLE)


@given(GROUPS, INDICES, SHARES, SHARES)
def test_a_larger_share_keeps_all_traces_of_a_smaller_one(
    group: str, index: int, a: float, b: float
) -> None:
    trace = episode_context(group, index).trace
    assert not sampled(trace, 0)
    assert sampled(trace, 1)
    assert sampled(trace, max(a, b)) or not sampled(trace, min(a, b))


def test_the_sampled_share_is_as_configured() -> None:
    kept = sum(sampled(episode_context(f"job.{n}", 0).trace, 0.01) for n in range(100_000))
    # Binomial with standard deviation 31; the ids are fixed, so this is deterministic.
    assert 850 < kept < 1150


def test_another_process_derives_the_same_ids() -> None:
    code = "from paceline.platform.telemetry.tracing import *\n"
    code += "print(episode_context('job.7', 3).trace_id)"
    for _ in range(2):  # string hashes differ between processes
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.strip() == episode_context("job.7", 3).trace_id


@given(GROUPS, INDICES)
def test_a_traceparent_round_trips(group: str, index: int) -> None:
    context = episode_context(group, index)
    text = traceparent(context)
    assert parse(text) == (context, 0)
    assert parse(f"{text};sent=12") == (context, 12)
    assert parse(text[:-2] + "00") is None


@given(st.text(max_size=80))
def test_any_other_text_is_not_a_trace(text: str) -> None:
    found = parse(text)
    assert found is None or traceparent(found[0])[3:-3] in text


def test_traceparents_that_w3c_forbids() -> None:
    good = traceparent(SpanContext(1, 2))
    assert parse(good)
    for bad in ("", good.upper().replace("0", "A"), "ff" + good[2:], good + "-", f" {good}"):
        assert parse(bad) is None
    assert parse(f"00-{0:032x}-{2:016x}-01") is None
    assert parse(f"00-{1:032x}-{0:016x}-01") is None


def test_names_of_spans_differ() -> None:
    root = episode_context("job.1", 0)
    names = {derived(root, "lease", n) for n in range(100)} | {derived(root, "batch", 0), root}
    assert len(names) == 102
    steps = {step_context("job", incarnation, n) for incarnation in (1, 2) for n in range(50)}
    assert len({step.trace for step in steps}) == 100
