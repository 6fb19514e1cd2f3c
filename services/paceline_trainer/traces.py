"""Spans of optimiser steps: in the step's own trace, and in those of its episodes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

from paceline.platform.telemetry.tracing import NOTHING, OFF, Span, Tracer, step_context
from paceline_trainer.columns import Share

MAX_STAGES = 64  # per step; further ones have no span
Answer = TypeVar("Answer")
Stage = Callable[[str], AbstractContextManager[None]]


def no_stage(name: str) -> AbstractContextManager[None]:
    """A stage without a span."""
    del name
    return nullcontext()


class StepTraces:
    """Traces of one rank's steps. Rank 0 starts the trace of a step, other ranks add to it."""

    def __init__(
        self, tracer: Tracer = OFF, *, job_id: str = "", incarnation: int = 0, rank: int = 0
    ) -> None:
        self._tracer = tracer
        self._job_id = job_id
        self._incarnation = incarnation
        self._rank = rank
        self._arrived = 0
        self._root = NOTHING
        self._root_step = -1  # the latest step with a root span
        self._open: list[list[Span]] = []
        self._remaining = 0

    def now(self) -> int:
        """Nanoseconds since the epoch; 0 if tracing is off."""
        return self._tracer.now()

    def arrived(self, _: object) -> None:
        """Record that the next share has arrived, perhaps before the last step was done."""
        self._arrived = self._tracer.now()

    def begin(self, share: Share, since_ns: int) -> None:
        """Start the spans of a share that has been waited for since `since_ns`."""
        if not self._tracer:
            return
        step_span = self._step_span(share.step + 1)
        self._root_step = share.step + 1
        if self._rank == 0:
            self._root = self._tracer.root(
                "train",
                step_span.context,
                start_ns=since_ns,
                job=self._job_id,
                step=share.step + 1,
                incarnation=self._incarnation,
                batch=share.batch_id,
            )
        step_span.past("train.wait", since_ns, rank=self._rank)
        arrived = self._arrived or since_ns
        traces = dict.fromkeys(sample.trace for sample in share.samples if sample.trace)
        episodes = [self._tracer.received(trace, arrived) for trace in traces]
        for episode in episodes:
            episode.past("train.wait", arrived)
        self._open = [[step_span, *episodes]]
        self._remaining = MAX_STAGES

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Trace a part of the step; nested stages appear only in the step's own trace."""
        if not self._open or self._remaining <= 0:
            yield
            return
        self._remaining -= 1
        parents = self._open[-1] if len(self._open) == 1 else self._open[-1][:1]
        step_span, *episodes = [span.child(name, rank=self._rank) for span in parents]
        if len(self._open) == 1:
            step_span.links = [span.context for span in episodes]
            for span in episodes:
                span.links = [step_span.context]
        self._open.append([step_span, *episodes])
        try:
            yield
        finally:
            for span in self._open.pop():
                span.end()

    def end(self) -> None:
        """End the step's span."""
        self._root.end()
        self._root, self._open = NOTHING, []

    async def published(self, step: int, work: Awaitable[Answer]) -> Answer:
        """Trace the publication of a step's weights."""
        step_span = self._step_span(step)
        span = step_span.child("weights.publish", step=step)
        if step_span and self._root_step != step:  # weights from a checkpoint
            span = self._tracer.root(
                "weights.publish", step_span.context, job=self._job_id, step=step
            )
        with span:
            return await work

    def _step_span(self, step: int) -> Span:
        return self._tracer.below(step_context(self._job_id, self._incarnation, step))
