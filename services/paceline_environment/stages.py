"""Counts what open episodes wait for, and how finished ones ended."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from paceline.enums import Phase
from paceline.platform.server.liveness import WorkProgress
from paceline.platform.telemetry.usage import Usage
from paceline.types import WorkerPhase

# room: waiting for a slot, in generate; repeat: until an endpoint may be asked again, likewise;
# load: until an environment is loaded in a process
STAGES = (
    *(Phase.ROOM, Phase.GENERATE, Phase.REPEAT),
    *(Phase.STEP, Phase.LOAD, Phase.SCORE, Phase.SUBMIT),
)


def _zeros() -> dict[str, int]:
    return dict.fromkeys(STAGES, 0)


@dataclass(slots=True)
class JobStages:
    """Stages of the open episodes of one job: the episodes for training, or its evaluation."""

    version: int = -1  # that is evaluated
    waiting: dict[str, int] = field(default_factory=_zeros)
    left: dict[str, int] = field(default_factory=_zeros)
    refused: str = ""  # what an endpoint said last, of those that it is to be asked again
    tokens: int = 0  # received

    def phase(self, stage: str, *, job_id: str) -> WorkerPhase:
        """How many episodes have left a stage, and are in it; tokens move `generate` as well."""
        done = self.left[stage] + (self.tokens if stage == Phase.GENERATE else 0)
        detail = self.refused if stage == Phase.REPEAT else ""
        total = done + self.waiting[stage]
        return WorkerPhase(stage, self.version, done, total, job_id, detail=detail)

    def wait(self, stage: str) -> AbstractContextManager[None]:
        """Count an episode as waiting for `stage` inside the context."""
        return _InStage(self, stage)


@dataclass(slots=True)
class Stages:
    """Counters of one worker."""

    jobs: dict[tuple[str, bool], JobStages] = field(
        default_factory=dict[tuple[str, bool], JobStages]
    )
    """By job, and whether they are of its evaluation."""
    finished: int = 0
    infra_errors: int = 0
    restarted: int = 0  # episodes that could not be resumed
    tokens_lost: int = 0  # of those
    tokens_resumed: int = 0  # sampled before a failure and kept
    tokens_received: int = 0  # from rollout workers
    usage: Usage | None = None

    def of(self, job_id: str, version: int = -1) -> JobStages:
        """The stages of a job; with a `version`, those of its evaluation of that version."""
        stages = self.jobs.setdefault((job_id, version >= 0), JobStages())
        stages.version = version
        return stages

    def end(self, job_id: str) -> None:
        """Forget a job, as far as no episodes of it are open."""
        for key in [key for key in self.jobs if key[0] == job_id]:
            if not any(self.jobs[key].waiting.values()):
                del self.jobs[key]

    @property
    def waiting(self) -> dict[str, int]:
        """Open episodes of all jobs by what they wait for."""
        total = Counter(_zeros())
        for job in self.jobs.values():
            total.update(job.waiting)
        return dict(total)

    def progress(self) -> WorkProgress:
        """Environment steps in progress and done; all other stages wait for another service."""
        done = {name: n for name, job in self.jobs.items() if (n := job.left[Phase.STEP])}
        return WorkProgress(self.waiting[Phase.STEP], done)

    def phases(self) -> tuple[WorkerPhase, ...]:
        """The stages in which there are episodes, by job."""
        return tuple(
            job.phase(stage, job_id=job_id)
            for (job_id, _), job in self.jobs.items()
            for stage, count in job.waiting.items()
            if count
        )

    def status(self) -> dict[str, Any]:
        """Fields for `/statusz`."""
        return {"waiting": self.waiting, "finished": self.finished}

    def waits_on(self, service: str) -> AbstractContextManager[None]:
        """Count an episode as waiting for a service inside the context."""
        return nullcontext() if self.usage is None else self.usage.wait(service)


class _InStage:
    """A class, as it is three times as fast as a generator and every episode enters several."""

    __slots__ = ("_stage", "_stages")

    def __init__(self, stages: JobStages, stage: str) -> None:
        self._stages = stages
        self._stage = stage

    def __enter__(self) -> None:
        self._stages.waiting[self._stage] += 1

    def __exit__(self, *_: object) -> None:
        self._stages.waiting[self._stage] -= 1
        self._stages.left[self._stage] += 1
