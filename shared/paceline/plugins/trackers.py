"""The protocol of experiment trackers, with their runs, points and samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that a tracker records. `run_id` and `folder` are the same after a restart."""

    run_id: str
    name: str
    tenant: str
    axis: str  # step | version: the x axis of curves
    folder: Path  # for files of this tracker of this job; exists
    shared_folder: Path  # for files that all jobs share; the tracker creates it if needed
    config: Mapping[str, Any]  # the job file as JSON


@dataclass(frozen=True, slots=True)
class TrackedSample:
    """One trajectory for the table of samples."""

    prompt: str
    response: str
    reward: float
    parts: Mapping[str, float]
    version: int  # oldest version that sampled it
    staleness: int  # in trainer steps; -1: not known
    truncated: bool
    episode: str


@dataclass(frozen=True, slots=True)
class TrackedPoint:
    """Metric values at one point in time.

    `train` and `eval` points are the rows of the job's history: `index` counts from 0 without gaps.
    `system` points describe worker activity; they have no index and are delivered at most once.
    """

    kind: str  # train | eval | system
    index: int  # -1: system
    step: int
    version: int  # of the weights; -1: none yet
    values: Mapping[str, float]
    samples: tuple[TrackedSample, ...] = ()


class Tracker(Protocol):
    """One run in an experiment tracker, in a process of its own: it may block, raise or hang.

    Created by `factory(run, **options)`, which resumes an existing run. If a call takes longer than
    `timeout_s`, the process is killed with SIGKILL and the tracker created again.
    """

    @property
    def url(self) -> str:
        """Link to the run; empty if unknown."""
        ...

    @property
    def rows(self) -> int | None:
        """Number of rows of the history that the run already holds; None: unknown.

        The next row written has this index. If unknown, rows that were not acknowledged before a
        restart are sent again.
        """
        ...

    def write(self, points: Sequence[TrackedPoint]) -> None:
        """Write points; they are durable when this returns."""
        ...

    def finish(self, state: str, summary: Mapping[str, Any]) -> None:
        """End the run: the job has succeeded, failed or been cancelled."""
        ...

    def close(self) -> None:
        """Release resources before the process exits; the run stays open."""
        ...
