"""Choosing the rollout worker of a turn, and the order of waiting turns. Pure functions."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Generic, TypeVar

from paceline.errors import VersionGoneError
from paceline.types import Worker

Item = TypeVar("Item", bound=Hashable)
# A worker may queue one request per this many slots of its engine, so that a slot that becomes free
# is filled at once and not after a round trip.
_QUEUE_SHARE = 8


@dataclass(slots=True, eq=False)
class RolloutCandidate:
    """A rollout worker as one of its callers sees it.

    Own requests are known exactly, those of other callers from the worker's report, which is a
    second or two old and also has its capacity.
    """

    worker: Worker
    own_open: int = 0
    own_tokens: int = 0
    others_open: int = 0
    others_tokens: int = 0
    callers: int = 1
    capacity: int = 0  # requests at once; 0: not reported
    backoff_until: float = 0.0
    reported: Mapping[str, float] = field(default_factory=dict[str, float])
    # Copies of the worker's: every pick reads them for all workers, so plain fields pay off.
    worker_id: str = field(init=False)
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.worker_id, self.version = self.worker.worker_id, self.worker.active_version

    @property
    def tokens(self) -> int:
        """Tokens in flight for all callers: contexts plus the maximum still to be sampled."""
        return self.own_tokens + self.others_tokens

    @property
    def limit(self) -> int:
        """Maximum number of open requests, including a short queue in the engine."""
        return self.capacity + max(self.capacity // _QUEUE_SHARE, 1)

    @property
    def has_slot(self) -> bool:
        """Whether the worker may be sent one more request.

        A caller may always use an even share of the slots, whatever the reports say: otherwise a
        caller that fills every slot as it becomes free would starve all others.
        """
        if self.own_open + self.others_open < self.capacity or not self.capacity:
            return True
        share = self.limit // self.callers or 1
        return self.own_open + self.others_open < self.limit or self.own_open < share

    def update(self, worker: Worker) -> None:
        """Apply a report of the roster; a report that is already known changes nothing."""
        self.worker, self.version, load = worker, worker.active_version, worker.load
        if load == self.reported:
            return
        self.reported = load
        self.capacity = int(load.get("max_running", 0))
        self.callers = max(int(load.get("callers", 0)) + (not self.own_open), 1)
        self.others_open = max(int(load.get("open", 0)) - self.own_open, 0)
        self.others_tokens = max(int(load.get("open_tokens", 0)) - self.own_tokens, 0)


def eligible(
    candidates: Sequence[RolloutCandidate],
    *,
    pinned: int,
    min_version: int,
    avoid: Container[str],
    now: float,
) -> list[RolloutCandidate]:
    """Workers that may serve a turn; those that have just failed only if there are no others.

    A turn that is pinned to a version goes to workers that serve it, else to those that will;
    others go to workers whose version is at least `min_version`.

    Raises:
        VersionGoneError: all workers are past the pinned version.
    """
    usable = [candidate for candidate in candidates if candidate.version >= 0]
    if pinned >= 0:
        serving = [candidate for candidate in usable if candidate.version == pinned]
        behind = [candidate for candidate in usable if candidate.version < pinned]
        if usable and not serving and not behind:
            raise VersionGoneError(f"no rollout worker serves version {pinned}")
        usable = serving or behind
    else:
        usable = [candidate for candidate in usable if candidate.version >= min_version]
    fresh = [p for p in usable if p.worker_id not in avoid and p.backoff_until <= now]
    return fresh or usable


def pick(
    candidates: Sequence[RolloutCandidate],
    *,
    pinned: int,
    held: Mapping[str, int],
    prefix_value: float,
    rng: Callable[[], float],
) -> RolloutCandidate | None:
    """The cheapest of two random free workers and of those that hold a prefix; None: all are full.

    A worker costs its tokens in flight, less `prefix_value` for each token of the prefix that it
    holds (`held`, by worker id): it is passed over when it has more tokens in flight than the
    other by more than that. Two random ones rather than all: callers that see the same stale
    reports would otherwise all choose the same worker. Both draw and cost are weighted by capacity.
    """
    # A turn pinned to a future version takes no slot before the worker has that version.
    free = [
        candidate for candidate in candidates if candidate.has_slot or candidate.version < pinned
    ]
    if len(free) < 2:
        return free[0] if free else None
    largest = max([candidate.capacity for candidate in free]) or 1
    drawn = _two(free, [candidate.capacity or largest for candidate in free], rng)
    drawn += [candidate for candidate in free if candidate.worker_id in held]

    def cost(candidate: RolloutCandidate) -> float:
        load = candidate.tokens * largest / (candidate.capacity or largest)
        return load - prefix_value * held.get(candidate.worker_id, 0)

    return min(drawn, key=cost)


def _two(
    free: Sequence[RolloutCandidate], weights: Sequence[int], rng: Callable[[], float]
) -> list[RolloutCandidate]:
    """Two different candidates."""
    first = _draw(weights, rng())
    second = _draw([*weights[:first], *weights[first + 1 :]], rng())
    return [free[first], free[second + (second >= first)]]


def _draw(weights: Sequence[int], u: float) -> int:
    """An index, drawn in proportion to the weights; `u` is in [0, 1)."""
    ends = list(accumulate(weights))
    return bisect_right(ends, u * ends[-1], hi=len(ends) - 1)


class FairWaitQueue(Generic[Item]):
    """Round robin over queues, first come first served within each."""

    def __init__(self) -> None:
        self._queues: OrderedDict[Hashable, OrderedDict[Item, None]] = OrderedDict()

    def __bool__(self) -> bool:
        """Whether anything is queued."""
        return bool(self._queues)

    def add(self, queue: Hashable, item: Item) -> None:
        """Append to a queue."""
        self._queues.setdefault(queue, OrderedDict())[item] = None

    def remove(self, queue: Hashable, item: Item) -> None:
        """Remove an item; a no-op if it is not queued."""
        waiting = self._queues.get(queue)
        if waiting is not None:
            waiting.pop(item, None)
            if not waiting:
                del self._queues[queue]

    def serve(self, offer: Callable[[Item], bool]) -> None:
        """Offer slots to the head of each queue in turn, until none accepts one."""
        refused = 0
        while refused < len(self._queues):
            queue, waiting = next(iter(self._queues.items()))
            self._queues.move_to_end(queue)
            item = next(iter(waiting))
            if offer(item):
                self.remove(queue, item)
                refused = 0
            else:
                refused += 1
