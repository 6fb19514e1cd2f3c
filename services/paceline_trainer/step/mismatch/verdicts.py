"""Decides by rollout worker whether its engine computes something else than the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from paceline.types import WorkerMismatch

LEAST_EXCESS = 0.05  # nats per token; correct engines stay below in any precision
NOISE_RATIO = 20
MAX_EXCESSES = 3  # versions running


@dataclass(frozen=True, slots=True)
class Differences:
    """Sums over compared tokens."""

    tokens: float
    k1: float
    k3: float
    largest: float  # absolute difference of log-probs

    @property
    def kl(self) -> float:
        """Nats per token; 0 without tokens."""
        return self.k3 / self.tokens if self.tokens else 0.0

    def joined(self, other: Differences) -> Differences:
        """Over the tokens of both."""
        largest = max(self.largest, other.largest)
        return Differences(
            self.tokens + other.tokens, self.k1 + other.k1, self.k3 + other.k3, largest
        )


@dataclass(frozen=True, slots=True)
class WorkerCheck:
    """What the tokens that a worker has sampled with one version say."""

    worker: str  # empty: unknown
    version: int
    differences: Differences  # the engine's log-probs minus the trainer's
    noise: float | None = None  # KL between two ways of the trainer itself; measured if it matters

    @property
    def allowed(self) -> float:
        """The largest KL that rounding explains."""
        return max(LEAST_EXCESS, NOISE_RATIO * (self.noise or 0.0))

    @property
    def excessive(self) -> bool:
        """Whether engine and trainer differ by more than rounding explains."""
        return not self.differences.kl <= self.allowed


class MismatchLimit:
    """Finds workers that compute something else than the trainer, version after version.

    Such a worker is at fault if another one agrees with the trainer meanwhile. If none does in so
    many versions, the engine itself, or the trainer, is wrong.
    """

    def __init__(self) -> None:
        self._running: dict[str, list[WorkerCheck]] = {}  # excessive ones, by worker
        self._agreed: dict[str, int] = {}  # newest version in which a worker agreed
        self._lonely: list[list[WorkerCheck]] = []  # of versions running in which none agreed

    def take(self, checks: Sequence[WorkerCheck]) -> list[WorkerMismatch]:
        """The verdicts on these workers, after these further checks, in order of versions."""
        for check in checks:
            name = check.worker
            if check.excessive:
                self._running[name] = [*self._running.get(name, ()), check][-MAX_EXCESSES:]
            else:
                self._running.pop(name, None)
                self._agreed[name] = check.version
        for _, of_version in groupby(checks, key=lambda check: check.version):
            some = list(of_version)
            lonely = all(check.excessive for check in some)
            self._lonely = [*self._lonely, some][-MAX_EXCESSES:] if lonely else []
        return [
            self._verdict(check) for check in {check.worker: check for check in checks}.values()
        ]

    @property
    def problem(self) -> str:
        """What is wrong with all engines; empty if nothing is, or only with some workers."""
        return _problem(self._lonely) if len(self._lonely) == MAX_EXCESSES else ""

    def _verdict(self, check: WorkerCheck) -> WorkerMismatch:
        running = self._running.get(check.worker, [])
        at_fault = len(running) == MAX_EXCESSES and self._contradicted(running)
        return WorkerMismatch(
            worker_id=check.worker,
            version=check.version,
            kl=check.differences.kl,
            allowed=check.allowed,
            since_version=running[0].version if running else None,
            at_fault=at_fault,
        )

    def _contradicted(self, running: Sequence[WorkerCheck]) -> bool:
        """Whether another worker agrees with the trainer, in these versions or later."""
        return any(version >= running[0].version for version in self._agreed.values())


def _problem(versions: Sequence[Sequence[WorkerCheck]]) -> str:
    """How much the tokens of these versions differ, for people."""
    checks = [check for some in versions for check in some]
    kls = ", ".join(f"{min(check.differences.kl for check in some):.3g}" for some in versions)
    numbers = ", ".join(str(some[0].version) for some in versions)
    noise = max(check.noise or 0.0 for check in checks)
    return (
        f"trainer.mismatch: mismatch_kl of versions {numbers} is {kls}; allowed: at most "
        f"{max(LEAST_EXCESS, NOISE_RATIO * noise):.3g} ({NOISE_RATIO} times the trainer's own "
        f"noise, {noise:.2g}, and at least {LEAST_EXCESS}). The engine computes others "
        "from the same weights: use another engine or another precision; "
        "`on_excess: warn` trains in spite of it"
    )
