"""Which histories are tried: every request and every kill in every state.

A history leads one job through states, and makes a request in each while a process is killed. A
fork of the job shares its history from then on.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import TypeVar

from paceline.enums import JobState, WorkerKind

Choice = TypeVar("Choice")
CHANGES = ("pause", "resume", "fork", "suspend", "unsuspend", "")
ENDINGS = ("cancel", "delete", "kubectl delete")
LATE = "controller with a late request"  # its last one arrives once the job has moved on
KILLS: tuple[WorkerKind | str | None, ...] = (
    *(WorkerKind.EXPERIENCE, WorkerKind.GATEWAY, WorkerKind.CONTROLLER, LATE),
    *(WorkerKind.TRAINER, WorkerKind.ENVIRONMENT, WorkerKind.REWARD, WorkerKind.ROLLOUT, None),
)
LAGS_S = (-0.03, 0.0, 0.001, 0.003, 0.01, 0.03)
_PATH = (
    *(JobState.QUEUED, JobState.STARTING, JobState.RUNNING),
    *(JobState.PAUSING, JobState.PAUSED, JobState.RUNNING),
)


@dataclass(frozen=True)
class Step:
    """In a state of the job a request is made, and a process is killed meanwhile."""

    state: JobState
    request: str  # empty: nothing
    kill: WorkerKind | str | None
    lag_s: float  # from the request to the kill; negative: the other way round


@dataclass(frozen=True)
class History:
    """What happens to a job, which `fails` by itself or succeeds unless it is ended before."""

    steps: tuple[Step, ...]
    of_object: bool
    fails: bool
    ttl: bool


class _Balanced:
    """Chooses so that each comes equally often in every state."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._chosen = Counter[tuple[JobState, object]]()

    def choose(self, state: JobState, choices: tuple[Choice, ...]) -> Choice:
        fewest = min(self._chosen[state, choice] for choice in choices)
        rare = [choice for choice in choices if self._chosen[state, choice] == fewest]
        choice = self._chance.choice(rare)
        self._chosen[state, choice] += 1
        return choice


def histories(seed: int) -> list[History]:
    """Jobs that are ended in every state of `_PATH` in every way, or end by themselves."""
    chance = random.Random(seed)
    requests, kills = _Balanced(chance), _Balanced(chance)
    found: list[History] = []
    for ending in ENDINGS:
        for length in range(1, len(_PATH) + 2):
            fails = ending == "delete"
            path, last = [*_PATH[:length]], length - 1
            whole = length > len(_PATH)
            if not whole:
                path += [JobState.CANCELLING, JobState.CANCELLED]
            else:
                path += [JobState.FAILED] * 9 if fails else [JobState.SUCCEEDED] * 5
                last = len(path) - 1
            steps = [
                Step(
                    state=state,
                    request=ending if number == last else requests.choose(state, CHANGES),
                    # Only a job that is resumed afterwards could be paused by mistake.
                    kill=LATE
                    if whole and state is JobState.PAUSING
                    else kills.choose(state, KILLS),
                    lag_s=chance.choice(LAGS_S),
                )
                for number, state in enumerate(path)
            ]
            of_object = ending == "kubectl delete" or chance.random() < 0.5
            ttl = ending == "cancel" and chance.random() < 0.3
            found.append(History(tuple(steps), of_object=of_object, fails=fails, ttl=ttl))
    return found
