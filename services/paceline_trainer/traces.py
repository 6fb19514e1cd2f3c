"""Spans of optimiser steps: in a trace of the step's own, and in those of its episodes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

from paceline.tracing import NOTHING, OFF, Span, Tracer, step_context
from paceline_trainer.take import Share

MOST_STAGES = 64  # of a step; what is beyond is in the span around them
Answer = TypeVar("Answer")
Stage = Callable[[str], AbstractContextManager[None]]


def unseen(name: str) -> AbstractContextManager[None]:
    """A stage that nobody follows."""
    del name
    return nullcontext()


class StepTraces:
    """One rank's. Rank 0 makes the step's own trace, the other ranks add to it."""

    def __init__(
        self, tracer: Tracer = OFF, *, job_id: str = "", incarnation: int = 0, rank: int = 0
    ) -> None:
        self._tracer = tracer
        self._job_id = job_id
        self._incarnation = incarnation
        self._rank = rank
        self._arrived = 0
        self._root = NOTHING
        self._rooted = -1  # the step whose trace has its root
        self._inside: list[list[Span]] = []
        self._left = 0

    def now(self) -> int:
        """Nanoseconds since the epoch; 0 while nothing is traced."""
        return self._tracer.now()

    def arrived(self, _: object) -> None:
        """The share of the next step has come in, perhaps before the last step was over."""
        self._arrived = self._tracer.now()

    def begin(self, share: Share, since_ns: int) -> None:
        """A share is taken that was waited for since then."""
        if not self._tracer:
            return
        own = self._own(share.step + 1)
        self._rooted = share.step + 1
        if self._rank == 0:
            self._root = self._tracer.root(
                "train",
                own.context,
                start_ns=since_ns,
                job=self._job_id,
                step=share.step + 1,
                incarnation=self._incarnation,
                batch=share.batch_id,
            )
        own.past("train.wait", since_ns, rank=self._rank)
        arrived = self._arrived or since_ns
        traces = dict.fromkeys(sample.trace for sample in share.samples if sample.trace)
        episodes = [self._tracer.received(trace, arrived) for trace in traces]
        for episode in episodes:
            episode.past("train.wait", arrived)
        self._inside = [[own, *episodes]]
        self._left = MOST_STAGES

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """A part of the step, in all traces that show it; one inside another in the step's own."""
        if not self._inside or self._left <= 0:
            yield
            return
        self._left -= 1
        shown = self._inside[-1] if len(self._inside) == 1 else self._inside[-1][:1]
        own, *episodes = [span.child(name, rank=self._rank) for span in shown]
        if len(self._inside) == 1:
            own.links = [span.context for span in episodes]
            for span in episodes:
                span.links = [own.context]
        self._inside.append([own, *episodes])
        try:
            yield
        finally:
            for span in self._inside.pop():
                span.end()

    def end(self) -> None:
        """The step is done."""
        self._root.end()
        self._root, self._inside = NOTHING, []

    async def published(self, step: int, work: Awaitable[Answer]) -> Answer:
        """The publication of a step's weights, in the trace of the step."""
        own = self._own(step)
        span = own.child("weights.publish", step=step)
        if own and self._rooted != step:  # of a model that no step led to here
            span = self._tracer.root("weights.publish", own.context, job=self._job_id, step=step)
        with span:
            return await work

    def _own(self, step: int) -> Span:
        return self._tracer.below(step_context(self._job_id, self._incarnation, step))
