"""A fully traced run: the trace of each episode, also when a rollout worker dies."""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from paceline_harness.otlp import Collector, Received, below, gaps
from paceline_harness.patience import PATIENCE_S

STEPS = 24
HELD_FROM = 10  # the first step that waits for the gate; by far not begun at the third
GROUPS = 4
TURNS = 3
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@dataclass(frozen=True)
class Run:
    """The results and spans of a run."""

    spans: list[Received]
    traces: dict[str, list[Received]]
    trajectories: list[Any]
    killed: str  # the rollout worker
    logs: dict[str, str]

    def whole(self) -> list[tuple[Received, list[Received]]]:
        """Episodes traced from admission to the resulting weights."""
        found = [(self.root(trace), trace) for trace in self.traces.values()]
        return [
            (root, trace)
            for root, trace in found
            if root is not None
            and "paceline.version" in root.attributes
            and not root.attributes["paceline.partial"]
        ]

    def root(self, trace: list[Received]) -> Received | None:
        """The episode span of a trace; None if it is not an episode's."""
        return next((span for span in trace if span.name == "episode"), None)


def find(trace: list[Received], name: str) -> list[Received]:
    return [span for span in trace if span.name == name]


@pytest.fixture(scope="module")
def traced(
    tmp_path_factory: pytest.TempPathFactory,
    start_platform: Callable[..., Any],
    tiny_job: Callable[..., Any],
    until: Callable[..., None],
) -> Iterator[Run]:
    """Two rollout workers, one of which is killed during the run."""
    folder: Path = tmp_path_factory.mktemp("traced")
    gate = folder / "gate"
    held = {
        "function": "paceline_harness.gates:gated",
        "gate": str(gate),
        "from_group": HELD_FROM * GROUPS,
        "pattern": "",
        "timeout_s": PATIENCE_S,
    }
    job = tiny_job(
        name="traced",
        tasks={
            "environment": "quiz",
            "options": {"digits": 1, "turns": TURNS},
        },
        eval=None,
        reward=[
            {"kind": "environment"},
            {"kind": "exact", "weight": 0.5},
            {"kind": "python", "weight": 0.0, **held},
        ],
        sampling={"max_tokens": 6, "max_context": 60},
        rollout={"replicas": 2},
        stop={"steps": STEPS},
    )
    with Collector() as collector:
        platform = start_platform(
            folder / "run", "--otlp", collector.endpoint, "--allow", str(held["function"])
        )
        with platform.client() as client:
            job_id = client.submit(job).status.job_id
            until(lambda: client.get(job_id).status.step >= 3, "no progress", PATIENCE_S)
            victim, pid = next(iter(platform.pids("rollout").items()))
            die_amid_answers(pid, collector, gate)
            status = client.wait(job_id, timeout_s=PATIENCE_S).status
            assert status.state == "succeeded", f"{status.reason}\n{platform.logs()}"
            page = client.list_trajectories(job_id, page_size=20)
        platform.stop()
        logs = {p.stem: p.read_text() for p in (folder / "run" / "logs").glob("*.log")}
        yield Run(collector.spans(), collector.traces(), page.trajectories, victim, logs)


def die_amid_answers(pid: int, collector: Collector, gate: Path) -> None:
    """Kill a rollout worker during a request; the job cannot finish before `gate` exists."""

    def since(started_ns: int) -> Callable[[list[Received]], int]:
        """How many requests have begun and ended since; spans are sent late."""
        return lambda spans: sum(
            span.name == "ask" and span.start_ns > started_ns for span in spans
        )

    released = since(time.time_ns())
    gate.touch()
    # Only now, so that it is not given up as silent before anything is sent to it.
    collector.wait(lambda spans: released(spans) >= 1, timeout_s=PATIENCE_S)
    os.kill(pid, signal.SIGSTOP)
    num_asked = since(time.time_ns())
    # Turns go where fewer are open, so that some now wait for the one that stands still.
    collector.wait(lambda spans: num_asked(spans) >= 16, timeout_s=PATIENCE_S)
    os.kill(pid, signal.SIGKILL)


def test_a_trace_shows_all_from_the_lease_to_the_weights(traced: Run) -> None:
    whole = traced.whole()
    assert len(whole) >= 3 * 16
    for root, trace in whole:
        names = Counter(span.name for span in trace)
        assert not names.keys() & {"queued"} or names["lease"] > 1
        attempts = [span for span in find(trace, "attempt") if not span.error]
        assert attempts, root
        made = below(attempts[-1], trace)
        inner = Counter(span.name for span in made)
        assert inner["environment.reset"] == inner["score"] == inner["submit"] == 1
        assert inner["generate"] == inner["environment.step"] >= 1
        for name in ("group", "ready", "batch", "weights"):
            assert names[name] == 1, (name, names)
        assert names["publish"] == names["broadcast"] == 1


def test_every_turn_has_spans_with_the_work_of_the_engine(traced: Run) -> None:
    turns = 0
    for _, trace in traced.whole():
        for turn in find(trace, "generate"):
            turns += 1
            asked = [span for span in below(turn, trace) if span.name == "ask"]
            assert asked
            answered = [span for span in asked if not span.error]
            assert len(answered) == 1
            if answered[0].attributes["paceline.worker"] == traced.killed:
                continue  # it took its last second of spans with it
            (rollout,) = (s for s in below(answered[0], trace) if s.name == "rollout")
            stages = [span.name for span in below(rollout, trace)]
            assert stages == ["queue", "prefill", "decode"]
            assert turn.attributes["gen_ai.usage.output_tokens"] > 0
            assert turn.attributes["paceline.versions"]
    assert turns > 16 * TURNS


def test_rewards_are_recorded_by_part(traced: Run) -> None:
    for _, trace in traced.whole():
        for reward in find(trace, "reward"):
            parts = below(reward, trace)
            told = {span.attributes["gen_ai.evaluation.name"] for span in parts}
            assert told == {"environment", "exact", "python"}
            assert reward.service == "paceline-reward"


def test_the_optimiser_step_is_in_the_trace_and_linked_both_ways(traced: Run) -> None:
    for _, trace in traced.whole():
        (batch,) = find(trace, "batch")
        (step,) = (span for span in below(batch, trace) if span.name == "train.step")
        ((other, inner),) = step.links
        own = traced.traces[other]
        (mine,) = (span for span in own if span.span_id == inner)
        assert {"prepare", "update", "metrics"} <= {span.name for span in below(mine, own)}
        assert (step.trace_id, step.span_id) in mine.links
        assert {span.name for span in own} >= {"train", "train.wait", "train.commit"}
    updates = [span for span in traced.spans if span.name == "update"]
    moved = [span for span in updates if below(span, traced.traces[span.trace_id])]
    stages = {child.name for span in moved for child in below(span, traced.traces[span.trace_id])}
    assert stages == {"plan", "forward", "backward", "optimizer"}


def test_the_weights_that_came_of_an_episode_are_followed_to_their_swap(traced: Run) -> None:
    swapped = 0
    for root, trace in traced.whole():
        (broadcast,) = find(trace, "broadcast")
        ((made_by, _),) = broadcast.links
        step = traced.traces[made_by]
        assert {"train", "train.step", "weights.publish"} <= {span.name for span in step}
        version = root.attributes["paceline.version"]
        for swap in (span for span in step if span.name == "weights.swap"):
            assert swap.attributes["paceline.version"] == version
            swapped += swap.end_ns > broadcast.start_ns
    assert swapped


def test_spans_have_their_parents_and_no_two_have_one_name(traced: Run) -> None:
    for root, trace in traced.whole():
        ids = [span.span_id for span in trace]
        assert len(set(ids)) == len(ids)
        assert root.parent_id == ""
        # What a killed worker had open is lost, and so are the parents of what it had sent.
        lost = [span for span in trace if span.parent_id and span.parent_id not in ids]
        assert all(span.worker == traced.killed for span in lost)


def test_no_stretch_is_unexplained(traced: Run) -> None:
    worst = {root.span_id: gaps(trace, root)[0] for root, trace in traced.whole()}
    # A machine that is busy enough can stop a process between any two lines of it.
    without = [gap for gap in worst.values() if gap[0] <= 0.05]
    assert len(without) >= len(worst) * 3 // 4, sorted(worst.values())
    for root, trace in traced.whole():
        stages = sorted(below(root, trace), key=lambda span: span.start_ns)
        for one, two in pairwise(stages):
            assert abs(two.start_ns - one.end_ns) <= 0.05 * (root.end_ns - root.start_ns)


def test_a_turn_continues_in_the_same_trace_when_its_worker_is_killed(traced: Run) -> None:
    failed = [s for s in traced.spans if s.name == "ask" and s.error == "UNAVAILABLE"]
    workers = {span.attributes["paceline.worker"] for span in failed}
    assert traced.killed in workers
    for span in failed:
        trace = traced.traces[span.trace_id]
        (turn,) = (each for each in trace if each.span_id == span.parent_id)
        again = [each for each in below(turn, trace) if each.name == "ask" and not each.error]
        assert again or turn.error


def test_a_sample_leads_to_its_trace(traced: Run) -> None:
    assert traced.trajectories
    for trajectory in traced.trajectories:
        _, trace_id, span_id, flags = trajectory.provenance.trace.split("-")
        assert flags == "01"
        (attempt,) = (s for s in traced.traces[trace_id] if s.span_id == span_id)
        assert attempt.name == "attempt"
        assert attempt.attributes["paceline.attempt"] == trajectory.attempt


def test_events_in_logs_name_the_trace(traced: Run) -> None:
    lines = [line for text in traced.logs.values() for line in text.splitlines()]
    named = {line.rpartition(" trace=")[2] for line in lines if " trace=" in line}
    assert named <= traced.traces.keys()
