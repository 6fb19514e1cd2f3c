"""A small job, its tasks, and trajectories of its episodes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.config import JobSpec
from paceline.enums import Purpose, ScoreStatus, TokenSource
from paceline.errors import StoreError
from paceline.types import (
    Assignment,
    CheckpointStatus,
    SamplingParams,
    Score,
    Task,
    TokenSpan,
    Trajectory,
    Transcript,
    VersionRun,
)
from paceline_experience.store.keys import JobKeys
from paceline_experience.store.store import Store


class FakeClock:
    """Ledger time that only advances through `advance`."""

    def __init__(self) -> None:
        self.time = 1000.0

    async def resume(self, saved_s: float) -> None:
        return

    def now(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        self.time += seconds


class Numbers:
    """A task source of a given size."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, position: int, /) -> Task:
        if not 0 <= position < self._size:
            raise IndexError(position)
        return Task(task_id=f"t{position}", environment="arithmetic", payload="{}", seed=position)


@dataclass(slots=True)
class RecordingHooks:
    store: Store
    rows: list[tuple[int, str, dict[str, Any]]] = field(
        default_factory=list[tuple[int, str, dict[str, Any]]]
    )
    ends: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    runs: int = 0
    losses: int = 0
    deaf: bool = False
    misses_a_loss: bool = False  # once
    listed: tuple[CheckpointStatus, ...] = ()

    async def recorded(self) -> None:
        kept = await self.store.command("LRANGE", JobKeys("default", "j1").metrics, 0, -1)
        rows = map(json.loads, kept)
        self.rows = [(row["step"], row["kind"], row["values"]) for row in rows]

    async def finished(self, *, state: str, reason: str) -> None:
        if self.deaf:
            raise StoreError("away")
        self.ends.append((state, reason))

    async def running(self) -> None:
        self.runs += 1

    async def checkpoints(self, listed: tuple[CheckpointStatus, ...]) -> None:
        self.listed = listed

    async def store_rolled_back(self) -> None:
        if self.misses_a_loss:
            self.misses_a_loss = False
            raise StoreError("away")
        self.losses += 1

    def of(self, kind: str) -> list[tuple[int, dict[str, Any]]]:
        return [(step, values) for step, k, values in self.rows if k == kind]


def make_spec(**changes: Any) -> JobSpec:
    """A small job: B=2 groups of 2, S=1, no eval, no samples; `changes` replace whole sections."""
    experience = {
        "batch_groups": 2,
        "group_size": 2,
        "max_staleness": 1,
        "lease_s": 10.0,
        "max_attempts": 3,
        "samples": {"trained": 0, "dropped": 0},
        **changes.pop("experience", {}),
    }
    fields: dict[str, Any] = {
        "name": "job",
        "model": {"path": "m"},
        "tasks": {"environment": "arithmetic", "seed": 7},
        "eval": None,
        "reward": [{"kind": "exact"}],
        "stop": {"steps": 1000},
        "experience": experience,
        **changes,
    }
    return JobSpec.model_validate(fields)


def made(
    assignment: Assignment,
    place: int,
    *,
    reward: float = 0.0,
    version: int = 0,
    status: ScoreStatus = ScoreStatus.OK,
    truncated: bool = False,
    tokens: int = 3,
) -> Trajectory:
    """The trajectory of the `place`-th episode of an assignment."""
    prompt = TokenSpan(0, 2, TokenSource.TEMPLATE)
    spans = (prompt, TokenSpan(2, 2 + tokens, TokenSource.POLICY))
    transcript = Transcript(
        tokens=tuple(range(2 + tokens)),
        spans=spans,
        logprobs=(-0.5,) * tokens,
        versions=(VersionRun(version, tokens),),
    )
    return Trajectory(
        group_id=assignment.group_id,
        index=assignment.indices[place],
        attempt=assignment.attempts[place],
        task_id=assignment.task.task_id,
        purpose=Purpose(assignment.purpose),
        transcripts=(transcript,),
        score=Score(reward=reward, parts={}, status=status),
        sampling=SamplingParams(max_tokens=8, temperature=0.7),
        truncated=truncated,
    )


def whole(assignments: Sequence[Assignment], *, version: int = 0) -> list[Trajectory]:
    """Trajectories of complete assignments, with different rewards within each group."""
    return [
        made(a, place, reward=float(index % 2), version=version)
        for a in assignments
        for place, index in enumerate(a.indices)
    ]
