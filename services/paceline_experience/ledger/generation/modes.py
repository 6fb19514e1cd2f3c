"""When training episodes may be leased at all, and are recalled, by the mode of a job."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.enums import GiveBackReason
from paceline_experience.ledger.context import LedgerContext
from paceline_experience.ledger.generation.back_off import BackOff
from paceline_experience.ledger.staleness import stale_groups


@dataclass(frozen=True, slots=True)
class EpisodeKey:
    """One lease: an attempt at an episode; `reason` and `detail` when it is returned."""

    group_id: str
    index: int
    attempt: int
    reason: GiveBackReason | None = None
    detail: str = ""


class Mode:
    """The mode of a job (`experience.mode`), as leases have to follow it."""

    def __init__(self, core: LedgerContext, back_off: BackOff) -> None:
        self._core, self._back_off = core, back_off
        self._name = core.spec.experience.mode
        self._recalled: dict[str, list[EpisodeKey]] = {}
        self.serving: frozenset[int] = frozenset()  # versions that rollout workers sample with

    @property
    def by_episode(self) -> bool:
        """Whether slots are filled by single episodes rather than by groups."""
        return self._name == "rollout_wise"

    @property
    def holds(self) -> bool:
        """Whether training episodes wait, queued ones too."""
        paused = bool(self._core.state.meta.paused)
        return paused or self._back_off.left_s > 0 or self._mode_holds()

    def _mode_holds(self) -> bool:
        state = self._core.state
        if self._name == "coupled":
            return any(state.age(version) < self._published for version in self.serving)
        if self._name != "april":
            return False
        full = len(state.ready) >= self._core.spec.experience.batch_groups
        ages = [state.age(version) for version in self.serving or (state.version,)]
        return full or state.step in state.batches or max(ages) < self._published

    @property
    def _published(self) -> int:
        """Step of the newest version that the trainer publishes before it trains the next step."""
        step = self._core.state.step
        return step - step % self._core.spec.trainer.publish_every

    def outdated(self) -> list[str]:
        """Groups with `april` that were continued so often that they have to begin anew."""
        if self._name != "april":
            return []
        state, bound = self._core.state, self._core.spec.experience.max_staleness
        idle = [name for name in state.open if "l" not in state.groups[name].states]
        return stale_groups(state, idle, step=state.step, max_staleness=bound)

    def recall(self) -> None:
        """Ask for what is leased, and for its progress, while nothing is leased.

        With `april`, and of a job that is paused, whose evaluations are recalled too.
        """
        paused = bool(self._core.state.meta.paused)
        if not paused and (self._name != "april" or not self._mode_holds()):
            return
        self._recalled = {}
        for group, index in self._core.state.leased():
            if paused or not group.is_eval:
                attempt = group.attempts[index]
                key = EpisodeKey(group.group_id, index, attempt, GiveBackReason.DRAIN)
                self._recalled.setdefault(group.workers[index], []).append(key)
        if self._recalled:
            self._core.work.fire()

    def forget(self) -> None:
        """The store was rolled back: what follows from the state is recalled anew."""
        self._recalled.clear()

    def recalled(self, worker_id: str) -> list[EpisodeKey]:
        """What a worker is to give back with its progress; each is told once per `recall`."""
        return self._recalled.pop(worker_id, []) if self._recalled else []
