"""The trace of each episode as the ledger sees it: one span for each state that it was in.

States follow each other without a gap, so the trace has none. The spans inside a state come from
whoever does the work: environment workers below `lease`, trainers below `batch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.platform.telemetry.tracing import (
    NOTHING,
    Span,
    Tracer,
    derived,
    episode_context,
    step_context,
)
from paceline_experience.ledger.state import GroupRecord

STAGES = {"q": "queued", "l": "lease", "f": "group", "r": "ready", "t": "batch", "n": "weights"}


@dataclass(slots=True)
class _EpisodeTrace:
    """The open spans of an episode."""

    root: Span
    stage: Span
    state: str
    step: int = -1  # the step whose batch it is in
    part: Span = NOTHING  # inside the stage: publish, then broadcast
    version: int = -1  # published after its step


class Traces:
    """Follows the episodes of a job whose traces are sampled.

    It knows only what this process has seen. After a restart a span begins when the ledger was
    opened; span ids stay the same, so spans of other processes still fit in.
    """

    def __init__(self, tracer: Tracer, *, job_id: str) -> None:
        self._tracer = tracer
        self._job_id = job_id
        self._opened = tracer.now()
        self._traces: dict[tuple[str, int], _EpisodeTrace] = {}
        self._trained: set[tuple[str, int]] = set()  # those that wait for their weights
        self._ended: set[tuple[str, int]] = set()  # trained again after their trace has ended

    def on_changes(
        self,
        changes: Iterable[tuple[GroupRecord | None, GroupRecord | None]],
        *,
        reasons: Sequence[str],
        step: int,
        incarnation: int,
    ) -> None:
        """Records have changed; `reasons` say why episodes among them were dropped."""
        if not self._tracer:
            return
        for before, after in changes:
            group = after or before
            if group is None or not self._tracer.keeps(group.group_id):
                continue
            for index in range(len(group.states)):
                was = before.states[index] if before else ""
                now = after.states[index] if after else _gone(was)
                if was != now:
                    self._move(group, index, was=was, now=now, step=step, incarnation=incarnation)
                if now == "x":
                    self._end(group.group_id, index, dropped=",".join(reasons))
                elif now == "m":
                    self._end(group.group_id, index, measured=True)

    def span(self, group_id: str, index: int) -> Span:
        """The span of an episode's present state; `NOTHING` if its trace is not sampled."""
        trace = self._traces.get((group_id, index))
        return trace.stage if trace else NOTHING

    def contexts(self, group_id: str, indices: Sequence[int]) -> tuple[str, ...]:
        """`Span.sent` of the present states of episodes; empty if none is followed."""
        if not self._tracer.keeps(group_id):
            return ()
        return tuple(self.span(group_id, index).sent for index in indices)

    def published(self, version: int, *, step: int, incarnation: int) -> None:
        """The weights of `step` were published as `version`."""
        for name in self._trained:
            trace = self._traces[name]
            if trace.version < 0 and trace.step < step:
                trace.version = version
                trace.part.end()
                made_by = step_context(self._job_id, incarnation, step)
                trace.part = trace.stage.child("broadcast", links=[made_by], version=version)

    def served(self, versions: Iterable[int]) -> None:
        """Rollout workers sample with these versions."""
        if self._trained:
            newest = max(versions, default=-1)
            for name in list(self._trained):
                version = self._traces[name].version
                if 0 <= version <= newest:
                    self._end(*name, version=version, served=newest)

    def close(self) -> None:
        """The job is over, or another replica owns it."""
        for name in list(self._traces):
            self._end(*name)

    def _move(
        self, group: GroupRecord, index: int, *, was: str, now: str, step: int, incarnation: int
    ) -> None:
        name = (group.group_id, index)
        trace = self._traces.get(name)
        if trace is None:
            # Its weights were served already, and the trainer has rewound since.
            if was == "n":
                self._ended.add(name)
            if name in self._ended:
                return
            trace = self._traces[name] = self._begin(group, index, was, incarnation)
        if now not in STAGES:
            return
        at_ns = self._tracer.now()
        trace.part.end(end_ns=at_ns)
        given_back = (trace.state, now) == ("l", "q")
        trace.stage.end(error="given back" if given_back else "", end_ns=at_ns)
        trace.step = step if now == "t" else trace.step
        trace.stage, trace.state, trace.part = (
            self._stage(trace.root, group, index, now, incarnation=incarnation, start_ns=at_ns),
            now,
            NOTHING,
        )
        if now == "n":
            trace.version = -1
            trace.part = trace.stage.child("publish")
            self._trained.add(name)
        else:
            self._trained.discard(name)

    def _begin(self, group: GroupRecord, index: int, state: str, incarnation: int) -> _EpisodeTrace:
        root = self._tracer.root(
            "episode",
            episode_context(group.group_id, index),
            start_ns=self._opened if state else 0,
            job=self._job_id,
            group=group.group_id,
            index=index,
            purpose="eval" if group.is_eval else "train",
            partial=bool(state),
        )
        stage = NOTHING
        if state:
            stage = self._stage(
                root, group, index, state, incarnation=incarnation, start_ns=self._opened
            )
        return _EpisodeTrace(root, stage, state)

    def _stage(
        self,
        root: Span,
        group: GroupRecord,
        index: int,
        state: str,
        *,
        incarnation: int,
        start_ns: int,
    ) -> Span:
        """Its id is derived: other processes add spans below it that may outlive this one."""
        number = {"l": group.attempts[index], "t": incarnation}.get(state, 0)
        context = derived(root.context, STAGES[state], number)
        stage = root.child(STAGES[state], context=context, start_ns=start_ns)
        if state == "l":
            stage.set(attempt=group.attempts[index], worker=group.workers[index])
        return stage

    def _end(self, group_id: str, index: int, **attributes: str | int | bool) -> None:
        trace = self._traces.pop((group_id, index), None)
        if trace is not None:
            self._trained.discard((group_id, index))
            trace.part.end()
            trace.stage.end()
            trace.root.set(step=trace.step, **attributes)
            trace.root.end()


def _gone(state: str) -> str:
    """The last state of a removed record: trained or measured episodes were not dropped."""
    return state if state in "ndm" else "x"
