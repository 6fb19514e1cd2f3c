"""Which histories are tried: every question in every state, and every death in every state.

A history leads one job through states, and in each asks something while a process dies. A fork of
the job shares its history from then on.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import TypeVar

from paceline.enums import JobState, WorkerKind

Card = TypeVar("Card")
CHANGES = ("pause", "resume", "fork", "suspend", "unsuspend", "")
ENDINGS = ("cancel", "delete", "kubectl delete")
LATE = "controller with a late request"  # its last one arrives once the job has moved on
KILLED: tuple[WorkerKind | str | None, ...] = (
    *(WorkerKind.EXPERIENCE, WorkerKind.GATEWAY, WorkerKind.CONTROLLER, LATE),
    *(WorkerKind.TRAINER, WorkerKind.ENVIRONMENT, WorkerKind.REWARD, WorkerKind.ROLLOUT, None),
)
LAGS_S = (-0.03, 0.0, 0.001, 0.003, 0.01, 0.03)
_PATH = (
    *(JobState.QUEUED, JobState.STARTING, JobState.RUNNING),
    *(JobState.PAUSING, JobState.PAUSED, JobState.RUNNING),
)


@dataclass(frozen=True)
class Moment:
    """In a state of the job something is asked, and a process dies meanwhile."""

    state: JobState
    ask: str  # empty: nothing
    killed: WorkerKind | str | None
    lag_s: float  # from the question to the death; negative: the other way round


@dataclass(frozen=True)
class History:
    """What happens to a job, which `fails` by itself or succeeds unless it is ended before."""

    moments: tuple[Moment, ...]
    of_object: bool
    fails: bool
    ttl: bool


class _Deck:
    """Deals cards so that each comes equally often in every state."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._dealt = Counter[tuple[JobState, object]]()

    def deal(self, state: JobState, cards: tuple[Card, ...]) -> Card:
        fewest = min(self._dealt[state, card] for card in cards)
        rare = [card for card in cards if self._dealt[state, card] == fewest]
        card = self._chance.choice(rare)
        self._dealt[state, card] += 1
        return card


def histories(seed: int) -> list[History]:
    """Jobs that are ended in every state of `_PATH` in every way, or end by themselves."""
    chance = random.Random(seed)
    asks, deaths = _Deck(chance), _Deck(chance)
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
            moments = [
                Moment(
                    state=state,
                    ask=ending if number == last else asks.deal(state, CHANGES),
                    # Only a job that is resumed afterwards could be paused by mistake.
                    killed=LATE
                    if whole and state is JobState.PAUSING
                    else deaths.deal(state, KILLED),
                    lag_s=chance.choice(LAGS_S),
                )
                for number, state in enumerate(path)
            ]
            of_object = ending == "kubectl delete" or chance.random() < 0.5
            ttl = ending == "cancel" and chance.random() < 0.3
            found.append(History(tuple(moments), of_object=of_object, fails=fails, ttl=ttl))
    return found
