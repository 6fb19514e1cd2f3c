"""The trace of each episode as the ledger sees it: one span for each state that it was in.

The states follow each other without a gap, so the trace has none. What goes on inside a state is
told by those who do it: environment workers below `lease`, trainers below `batch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.tracing import NOTHING, Span, Tracer, derived, episode_context, step_context
from paceline_experience.book import Group

STAGES = {"q": "queued", "l": "lease", "f": "group", "r": "ready", "t": "batch", "n": "weights"}


@dataclass(slots=True)
class _Line:
    """An episode's trace as far as it goes."""

    root: Span
    stage: Span
    state: str
    step: int = -1  # whose batch it is in
    part: Span = NOTHING  # of the stage: publish, then broadcast
    version: int = -1  # that came of its step


class Traces:
    """Follows the episodes of a job whose traces are kept.

    It knows what this process has seen. After a restart a span begins when the ledger was opened;
    names stay the same, so what others have made still fits in.
    """

    def __init__(self, tracer: Tracer, *, job_id: str) -> None:
        self._tracer = tracer
        self._job_id = job_id
        self._opened = tracer.now()
        self._lines: dict[tuple[str, int], _Line] = {}
        self._trained: set[tuple[str, int]] = set()  # those that wait for their weights
        self._over: set[tuple[str, int]] = set()  # trained again after their trace has ended

    def moved(
        self,
        changes: Iterable[tuple[Group | None, Group | None]],
        *,
        reasons: Sequence[str],
        step: int,
        incarnation: int,
    ) -> None:
        """Records have changed; `reasons` are those for which episodes were dropped."""
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
        """What an episode is in now; `NOTHING` if its trace is not kept."""
        line = self._lines.get((group_id, index))
        return line.stage if line else NOTHING

    def sent(self, group_id: str, indices: Sequence[int]) -> tuple[str, ...]:
        """`Span.sent` of what these episodes are in; empty if none is followed."""
        if not self._tracer.keeps(group_id):
            return ()
        return tuple(self.span(group_id, index).sent for index in indices)

    def announced(self, version: int, *, step: int, incarnation: int) -> None:
        """Weights of `step` are on their way as `version`."""
        for name in self._trained:
            line = self._lines[name]
            if line.version < 0 and line.step < step:
                line.version = version
                line.part.end()
                made_by = step_context(self._job_id, incarnation, step)
                line.part = line.stage.child("broadcast", links=[made_by], version=version)

    def served(self, versions: Iterable[int]) -> None:
        """Rollout workers answer with these versions."""
        if self._trained:
            newest = max(versions, default=-1)
            for name in list(self._trained):
                version = self._lines[name].version
                if 0 <= version <= newest:
                    self._end(*name, version=version, served=newest)

    def close(self) -> None:
        """The job is over, or another replica's."""
        for name in list(self._lines):
            self._end(*name)

    def _move(
        self, group: Group, index: int, *, was: str, now: str, step: int, incarnation: int
    ) -> None:
        name = (group.group_id, index)
        line = self._lines.get(name)
        if line is None:
            # Weights that came of it were served already, and the trainer has gone back since.
            if was == "n":
                self._over.add(name)
            if name in self._over:
                return
            line = self._lines[name] = self._begin(group, index, was, incarnation)
        if now not in STAGES:
            return
        line.part.end()
        line.stage.end(error="given back" if (line.state, now) == ("l", "q") else "")
        line.step = step if now == "t" else line.step
        line.stage, line.state, line.part = (
            self._stage(line.root, group, index, now, incarnation=incarnation),
            now,
            NOTHING,
        )
        if now == "n":
            line.version = -1
            line.part = line.stage.child("publish")
            self._trained.add(name)
        else:
            self._trained.discard(name)

    def _begin(self, group: Group, index: int, state: str, incarnation: int) -> _Line:
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
            stage = self._stage(root, group, index, state, incarnation=incarnation)
            stage.start_ns = self._opened
        return _Line(root, stage, state)

    def _stage(self, root: Span, group: Group, index: int, state: str, *, incarnation: int) -> Span:
        """Known by name, as others hang spans below it that may outlive this process."""
        number = {"l": group.attempts[index], "t": incarnation}.get(state, 0)
        stage = root.child(STAGES[state], context=derived(root.context, STAGES[state], number))
        if state == "l":
            stage.set(attempt=group.attempts[index], worker=group.workers[index])
        return stage

    def _end(self, group_id: str, index: int, **attributes: str | int | bool) -> None:
        line = self._lines.pop((group_id, index), None)
        if line is not None:
            self._trained.discard((group_id, index))
            line.part.end()
            line.stage.end()
            line.root.set(step=line.step, **attributes)
            line.root.end()


def _gone(state: str) -> str:
    """What a record that was taken out has become: what was trained or measured is just old."""
    return state if state in "ndm" else "x"
