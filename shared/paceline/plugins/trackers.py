"""Experiment trackers: runs, points and samples that they are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run of a job in a tracker. `run_id` and `folder` are the same after a restart."""

    run_id: str
    name: str
    tenant: str
    axis: str  # step | version: what curves are drawn over
    folder: Path  # for files of this tracker of this job; exists
    shared_folder: Path  # for files that all jobs share; made by who uses it
    config: Mapping[str, Any]  # the job file as JSON


@dataclass(frozen=True, slots=True)
class TrackedSample:
    """One trajectory for the table."""

    prompt: str
    response: str
    reward: float
    parts: Mapping[str, float]
    version: int  # oldest that sampled it
    staleness: int  # in trainer steps; -1: not known
    truncated: bool
    episode: str


@dataclass(frozen=True, slots=True)
class TrackedPoint:
    """Values of one moment.

    `train` and `eval` points are the rows of the job's history: `index` counts from 0 without gaps.
    `system` points have no index: what the workers do, each told at most once.
    """

    kind: str  # train | eval | system
    index: int  # -1: system
    step: int
    version: int  # of the weights; -1: none yet
    values: Mapping[str, float]
    samples: tuple[TrackedSample, ...] = ()


class Tracker(Protocol):
    """One run in an experiment tracker. Lives in a process of its own: may block, raise or hang.

    Made by `factory(run, **options)`, which opens the run of an earlier life if there is one. It is
    ended by SIGKILL when it takes longer than `timeout_s` over a call, and made again.
    """

    @property
    def url(self) -> str:
        """Where to look; empty if that is not known."""
        ...

    @property
    def rows(self) -> int | None:
        """How many rows of the history the run holds from earlier lives; None: cannot tell.

        The next row that comes has this index. One that cannot tell gets those again that were
        not acknowledged before it died.
        """
        ...

    def write(self, points: Sequence[TrackedPoint]) -> None:
        """Add points; they are safe when this returns."""
        ...

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        """The job is over: succeeded, failed or cancelled."""
        ...

    def close(self) -> None:
        """This process ends, the run does not."""
        ...
