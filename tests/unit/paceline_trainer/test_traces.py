from paceline.platform.telemetry.tracing import (
    Span,
    Tracer,
    derived,
    episode_context,
    step_context,
    traceparent,
)
from paceline.v1 import experience_pb2 as pb
from paceline_trainer.columns import Share
from paceline_trainer.traces import MAX_STAGES, StepTraces

EPISODES = [derived(episode_context("job.1", index), "batch", 2) for index in range(2)]
STEP = step_context("job", 2, 8)


class Clock:
    def __init__(self) -> None:
        self.now = 100

    def __call__(self) -> int:
        self.now += 1
        return self.now


def share(*traces: str) -> Share:
    samples = tuple(
        pb.TrainSample(group_id="job.1", index=i, trace=t) for i, t in enumerate(traces)
    )
    return Share("7-job.1", 7, len(samples), 10, samples)


def traces(spans: list[Span], rank: int = 0) -> StepTraces:
    tracer = Tracer(take=spans.append, share=1.0, clock=Clock())
    return StepTraces(tracer, job_id="job", incarnation=2, rank=rank)


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def test_a_step_is_in_its_episodes_traces_and_its_parts_in_its_own() -> None:
    spans: list[Span] = []
    made = traces(spans)
    made.arrived(None)
    texts = [f"{traceparent(context)};sent=50" for context in EPISODES]
    # Two transcripts of one episode, one of another, one that nobody follows.
    made.begin(share(texts[0], texts[0], texts[1], ""), since_ns=20)
    with made.stage("train.step"), made.stage("update"), made.stage("forward"):
        pass
    with made.stage("train.commit"):
        pass
    made.end()
    contexts = {STEP.trace, *(context.trace for context in EPISODES)}
    for name in ("train.wait", "train.step", "train.commit"):
        assert {span.context.trace for span in named(spans, name)} == contexts
        assert len(named(spans, name)) == 3
    (update,), (forward,) = named(spans, "update"), named(spans, "forward")
    assert [(span.start_ns, span.end_ns) for span in named(spans, "transit")] == [(50, 101)] * 2
    own, *theirs = named(spans, "train.step")
    assert own.parent == STEP
    assert [span.parent for span in theirs] == EPISODES
    assert own.links == [span.context for span in theirs]
    assert all(span.links == [own.context] for span in theirs)
    assert (update.parent, forward.parent) == (own.context, update.context)
    (root,) = named(spans, "train")
    assert (root.context, root.start_ns, root.attributes["step"]) == (STEP, 20, 8)


def test_other_ranks_add_to_the_trace_of_rank_0() -> None:
    spans: list[Span] = []
    made = traces(spans, rank=1)
    made.begin(share(traceparent(EPISODES[0])), since_ns=20)
    with made.stage("train.step"):
        pass
    made.end()
    assert not named(spans, "train")
    assert [span.attributes["rank"] for span in named(spans, "train.step")] == [1, 1]
    assert named(spans, "train.step")[0].parent == STEP


def test_a_step_of_very_many_parts_has_a_bounded_number_of_spans() -> None:
    spans: list[Span] = []
    made = traces(spans)
    made.begin(share(), since_ns=20)
    with made.stage("train.step"):
        for _ in range(1000):
            with made.stage("forward"):
                pass
    made.end()
    assert len(spans) == MAX_STAGES + 2


async def test_a_publication_without_a_step_begins_a_trace() -> None:
    spans: list[Span] = []
    made = traces(spans)

    async def work() -> int:
        return 5

    assert await made.published(0, work()) == 5
    made.begin(share(), since_ns=20)
    made.end()
    assert await made.published(8, work()) == 5
    first, second = named(spans, "weights.publish")
    assert (first.context, first.parent) == (step_context("job", 2, 0), None)
    assert second.parent == STEP


async def test_off_does_nothing() -> None:
    made = StepTraces()
    made.begin(share(traceparent(EPISODES[0])), since_ns=made.now())
    with made.stage("train.step"), made.stage("update"):
        pass
    made.end()

    async def work() -> int:
        return 5

    assert await made.published(0, work()) == 5
