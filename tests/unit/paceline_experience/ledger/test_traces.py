"""Whatever way episodes go through the ledger, their traces have no gap and end once."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from paceline.enums import EPISODE_TRANSITIONS, EpisodeState
from paceline.platform.telemetry.tracing import OFF, Span, Tracer, derived, episode_context, parse
from paceline_experience.ledger.state import GroupRecord
from paceline_experience.ledger.traces import STAGES, Traces
from paceline_experience.store.letters import LETTERS

STEPS = {LETTERS[a]: sorted(LETTERS[b] for b in after) for a, after in EPISODE_TRANSITIONS.items()}
OVER = {LETTERS[EpisodeState.DROPPED], LETTERS[EpisodeState.MEASURED]}
ROOT = episode_context("job.1", 0)


class Followed:
    """Traces on a clock of their own; `go` moves the one episode of a group."""

    def __init__(self, *, share: float = 1.0, version: int = -1) -> None:
        self.now = 0
        self.spans: list[Span] = []
        tracer = Tracer(take=self.spans.append, share=share, clock=self.tick)
        self.traces = Traces(tracer, job_id="job")
        self.group: GroupRecord | None = None
        self.version = version
        self.step = 0

    def tick(self) -> int:
        self.now += 1
        return self.now

    def go(self, state: str) -> None:
        before = self.group
        attempts = [(before.attempts[0] if before else 0) + (state == "l")]
        base = before or GroupRecord(
            "job.1", 1, 0, "q", [0], ["worker"], [None], 0, self.version, [0.0]
        )
        self.group = None if state == "x" else replace(base, states=state, attempts=attempts)
        change = [(before, self.group)]
        self.traces.on_changes(change, reasons=["stale"], step=self.step, incarnation=3)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


@st.composite
def walks(draw: st.DrawFn) -> list[str]:
    """A way through the states, from the first lease on."""
    states = ["l"]
    for _ in range(draw(st.integers(0, 20))):
        after = STEPS[states[-1]]
        if not after:
            break
        states.append(draw(st.sampled_from(after)))
    return states


@given(walks())
def test_states_follow_each_other_without_a_gap(walk: list[str]) -> None:
    followed = Followed()
    for state in walk:
        followed.go(state)
    followed.traces.close()
    roots = followed.named("episode")
    assert [root.context for root in roots] == [ROOT]
    stages = [span for span in followed.spans if span.parent == ROOT]
    assert [span.name for span in stages] == [STAGES[s] for s in walk if s in STAGES]
    for one, two in pairwise(stages):
        assert 0 <= two.start_ns - one.end_ns <= 4  # ticks of looking at the clock
    assert roots[0].start_ns <= stages[0].start_ns
    assert stages[-1].end_ns <= roots[0].end_ns
    assert all(span.end_ns for span in followed.spans)


def test_an_episode_that_a_filter_leaves_out_ends_once_and_its_group_goes_on() -> None:
    followed = Followed()
    base = GroupRecord("job.1", 1, 0, "qq", [1, 1], ["w", "w"], [None, None], 0, -1, [0.0, 0.0])
    before: GroupRecord | None = None
    for states in ("ll", "ff", "xr", "xt", "xn", "xd", ""):
        after = replace(base, states=states) if states else None
        followed.traces.on_changes(
            [(before, after)], reasons=["filtered"] * (states == "xr"), step=0, incarnation=1
        )
        before = after
    followed.traces.close()
    roots = {root.attributes["index"]: root for root in followed.named("episode")}
    assert len(followed.named("episode")) == 2
    assert roots[0].attributes["dropped"] == "filtered"
    assert "dropped" not in roots[1].attributes
    assert roots[0].end_ns < roots[1].end_ns


def trained(followed: Followed) -> None:
    for state in ("l", "f", "r", "t", "n"):
        followed.go(state)


def test_the_trace_ends_with_the_resulting_weights() -> None:
    followed = Followed()
    trained(followed)
    followed.traces.published(7, step=0, incarnation=3)  # made before its step
    followed.traces.served({7})
    assert not followed.named("episode")
    followed.traces.published(8, step=1, incarnation=3)
    followed.traces.served({7})
    assert not followed.named("episode")
    followed.traces.served({7, 8})
    (root,) = followed.named("episode")
    assert root.attributes["version"] == 8
    (publish,), (broadcast,) = followed.named("publish"), followed.named("broadcast")
    (weights,) = followed.named("weights")
    assert publish.parent == broadcast.parent == weights.context
    assert weights.start_ns < publish.end_ns <= broadcast.start_ns < broadcast.end_ns


def test_a_record_that_is_old_is_not_dropped() -> None:
    followed = Followed()
    trained(followed)
    followed.go("x")  # a durable checkpoint: its record goes
    assert not followed.named("episode")
    followed.traces.close()
    assert "dropped" not in followed.named("episode")[0].attributes


def test_a_dropped_episode_records_the_reason() -> None:
    followed = Followed()
    followed.go("l")
    followed.go("x")
    assert followed.named("episode")[0].attributes["dropped"] == "stale"


def test_an_eval_ends_when_it_is_measured() -> None:
    followed = Followed(version=2)
    followed.go("l")
    followed.go("m")
    (root,) = followed.named("episode")
    assert (root.attributes["purpose"], root.attributes["measured"]) == ("eval", True)


def test_every_attempt_is_a_lease_of_its_own_name() -> None:
    followed = Followed()
    followed.go("l")
    first = parse(followed.traces.span("job.1", 0).sent)
    followed.go("q")
    followed.go("l")
    second = parse(followed.traces.span("job.1", 0).sent)
    assert first is not None
    assert second is not None
    assert (first[0], second[0]) == (derived(ROOT, "lease", 1), derived(ROOT, "lease", 2))
    assert followed.named("lease")[0].error == "given back"


def test_a_trace_continues_with_the_same_ids_after_a_restart() -> None:
    before, after = Followed(), Followed()
    for state in ("l", "f", "r", "t"):
        before.go(state)
    after.group = before.group
    after.go("n")
    after.traces.close()
    (batch,) = after.named("batch")
    assert batch.context == before.traces.span("job.1", 0).context
    (root,) = after.named("episode")
    assert root.context == ROOT
    assert root.attributes["partial"]


def test_a_rewound_step_is_trained_again_in_the_same_trace() -> None:
    followed = Followed()
    trained(followed)
    followed.go("t")
    followed.go("n")
    followed.traces.published(9, step=1, incarnation=4)
    followed.traces.served({9})
    assert len(followed.named("batch")) == 2
    assert len(followed.named("episode")) == 1
    followed.go("t")  # once more, when its weights were served already
    followed.go("n")
    followed.traces.close()
    assert len(followed.named("episode")) == 1


def test_what_is_not_kept_leaves_nothing() -> None:
    silent = Followed(share=0.0)
    trained(silent)
    assert not silent.traces.span("job.1", 0)
    silent.traces.close()
    assert not silent.spans
    off = Traces(OFF, job_id="job")
    off.on_changes([(None, silent.group)], reasons=[], step=0, incarnation=1)
    assert not off.span("job.1", 0)
