"""What a mode reaches at best: the same episodes by its rules, while nothing else takes time.

The schedule is that of the ledger (docs/generation.md), event by event: slots decode at a fixed
rate and are refilled at once, a batch is trained in `train_s`, its weights are served at once.
Leases, rewards, messages and transfers of weights take no time, and an episode needs no other
slots than its own. So what a run loses against it are the costs of the services.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_REQUEUES = 5  # of a stale group, as `experience.max_attempts`


@dataclass(frozen=True, slots=True)
class Rules:
    """A mode, and the sizes that bound it."""

    slots: int
    batch_groups: int
    group_size: int
    max_staleness: int
    train_s: float
    april: bool = False
    extra: int = 0  # redundant episodes of a group


@dataclass(frozen=True, slots=True)
class Schedule:
    """When each step was committed, in seconds, and seconds of slots by what became of them."""

    commits_s: list[float]
    busy_s: float
    trained_s: float

    def step_s(self, first: int) -> float:
        """Mean time of a step, from the commit of the `first` on."""
        return (self.commits_s[-1] - self.commits_s[first]) / (len(self.commits_s) - 1 - first)


@dataclass(slots=True, eq=False)
class _Episode:
    group: _Group
    left_s: float
    since_s: float = -1.0  # running since; -1: it waits
    lease: int = 0


@dataclass(slots=True, eq=False)
class _Group:
    seq: int
    requeues: int
    episodes: list[_Episode] = field(default_factory=list[_Episode])
    finished: int = 0
    oldest: int = -1  # step of its oldest token; -1: it has none
    total_s: float = 0.0  # of its finished episodes


class Ideal:
    """One job; `seconds` gives the length of an episode by group and index."""

    def __init__(self, rules: Rules, seconds: Callable[[int, int], float]) -> None:
        self._rules = rules
        self._seconds = seconds
        self._now = 0.0
        self._step = 0
        self._next = 0
        self._accepted = 0
        self._again: list[tuple[int, int]] = []
        self._open: list[_Group] = []
        self._ready: list[_Group] = []
        self._waiting: list[tuple[int, int, _Episode]] = []
        self._running: set[_Episode] = set()
        self._ends: list[tuple[float, int, int, _Episode]] = []
        self._order = 0
        self._trained_at: float | None = None
        self._commits: list[float] = []
        self._busy_s = self._trained_s = 0.0

    def run(self, steps: int) -> Schedule:
        """Train this many steps."""
        while len(self._commits) < steps:
            self._take()
            self._fill()
            end_s = self._ends[0][0] if self._ends else float("inf")
            if self._trained_at is not None and self._trained_at <= end_s:
                self._now, self._trained_at = self._trained_at, None
                self._step += 1
                self._commits.append(self._now)
            elif self._ends:
                self._finish()
            else:
                raise RuntimeError(f"nothing runs at step {self._step}")
        return Schedule(self._commits, self._busy_s, self._trained_s)

    def _take(self) -> None:
        """Begin to train, if there is a batch; drop what is too old for it."""
        if self._trained_at is not None:
            return
        self._ready = [group for group in self._ready if not self._dropped(group, accepted=True)]
        if len(self._ready) < self._rules.batch_groups:
            return
        self._ready.sort(key=lambda group: (group.oldest, group.seq))
        batch = self._ready[: self._rules.batch_groups]
        del self._ready[: self._rules.batch_groups]
        self._trained_s += sum(group.total_s for group in batch)
        self._trained_at = self._now + self._rules.train_s
        if self._rules.april:
            self._recall()

    def _dropped(self, group: _Group, *, accepted: bool) -> bool:
        if group.oldest < 0 or self._step - group.oldest <= self._rules.max_staleness:
            return False
        self._accepted -= accepted
        if group.requeues < MAX_REQUEUES:
            insort(self._again, (group.seq, group.requeues + 1))
        return True

    def _recall(self) -> None:
        for episode in list(self._running):
            self._stop(episode)
            self._wait(episode)

    def _stop(self, episode: _Episode) -> None:
        passed = self._now - episode.since_s
        self._busy_s += passed
        episode.left_s -= passed
        episode.since_s = -1.0
        episode.lease += 1
        self._running.discard(episode)

    def _wait(self, episode: _Episode) -> None:
        self._order += 1
        insort(self._waiting, (episode.group.seq, self._order, episode))

    def _fill(self) -> None:
        """Lease what waits, older groups first, then new ones while they are admitted."""
        rules = self._rules
        full = len(self._ready) >= rules.batch_groups or self._trained_at is not None
        if rules.april:
            if full:
                return
            stale = [group for group in self._open if self._dropped(group, accepted=False)]
            self._open = [group for group in self._open if group not in stale]
            self._waiting = [each for each in self._waiting if each[2].group not in stale]
        while len(self._running) < rules.slots:
            bound = (rules.max_staleness + self._step + 1) * rules.batch_groups
            if not self._waiting and self._accepted + len(self._open) >= bound:
                return
            if not self._waiting:
                self._admit()
            self._start(self._waiting.pop(0)[2])

    def _admit(self) -> None:
        seq, requeues = self._again.pop(0) if self._again else (self._next, 0)
        self._next += seq == self._next
        group = _Group(seq, requeues)
        for index in range(self._rules.group_size + self._rules.extra):
            group.episodes.append(_Episode(group, self._seconds(seq, index)))
            self._wait(group.episodes[-1])
        self._open.append(group)

    def _start(self, episode: _Episode) -> None:
        episode.since_s = self._now
        self._running.add(episode)
        group = episode.group
        group.oldest = self._step if group.oldest < 0 else min(group.oldest, self._step)
        self._order += 1
        entry = (self._now + episode.left_s, self._order, episode.lease, episode)
        heapq.heappush(self._ends, entry)

    def _finish(self) -> None:
        end_s, _, lease, episode = heapq.heappop(self._ends)
        if episode.since_s < 0 or episode.lease != lease:
            return
        self._now = end_s
        self._stop(episode)
        group = episode.group
        group.finished += 1
        group.total_s += self._seconds(group.seq, group.episodes.index(episode))
        if group.finished < self._rules.group_size:
            return
        self._open.remove(group)
        for other in group.episodes:
            if other.since_s >= 0:
                self._stop(other)
        self._waiting = [each for each in self._waiting if each[2].group is not group]
        self._accepted += 1
        self._ready.append(group)
