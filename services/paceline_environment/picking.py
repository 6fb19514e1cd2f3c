"""Which rollout worker a turn goes to, and who goes first. Pure: chance and time come in."""

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
# So many of a worker's places again may wait in its engine: a place that becomes free there is
# filled at once, not after a round trip.
_QUEUE_SHARE = 8


@dataclass(slots=True, eq=False)
class Place:
    """A rollout worker as one of its callers sees it.

    Own requests are known exactly. What others have there is known from the worker's report,
    which is a second or two old; it says how many requests it can hold, too.
    """

    worker: Worker
    own_open: int = 0
    own_tokens: int = 0
    others_open: int = 0
    others_tokens: int = 0
    callers: int = 1
    capacity: int = 0  # requests at once; 0: it does not say
    shunned_until: float = 0.0
    reported: Mapping[str, float] = field(default_factory=dict[str, float])
    # Of the worker; plain fields, as each pick looks at those of all workers.
    worker_id: str = field(init=False)
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.worker_id, self.version = self.worker.worker_id, self.worker.active_version

    @property
    def tokens(self) -> int:
        """In flight: contexts and the most that may follow, of all callers."""
        return self.own_tokens + self.others_tokens

    @property
    def limit(self) -> int:
        """Requests that may be open there, a short queue included."""
        return self.capacity + max(self.capacity // _QUEUE_SHARE, 1)

    @property
    def has_room(self) -> bool:
        """Whether one more request may go there.

        An even share of the places is a caller's own whatever is reported: without that, a caller
        that fills every place as it becomes free would keep all others out.
        """
        if self.own_open + self.others_open < self.capacity or not self.capacity:
            return True
        share = self.limit // self.callers or 1
        return self.own_open + self.others_open < self.limit or self.own_open < share

    def learn(self, worker: Worker) -> None:
        """Take over what the roster says; the same report twice says nothing new."""
        self.worker, self.version, load = worker, worker.active_version, worker.load
        if load == self.reported:
            return
        self.reported = load
        self.capacity = int(load.get("max_running", 0))
        self.callers = max(int(load.get("callers", 0)) + (not self.own_open), 1)
        self.others_open = max(int(load.get("open", 0)) - self.own_open, 0)
        self.others_tokens = max(int(load.get("open_tokens", 0)) - self.own_tokens, 0)


def eligible(
    places: Sequence[Place], *, pinned: int, least: int, avoid: Container[str], now: float
) -> list[Place]:
    """Those that may answer, without those that failed just now unless there are no others.

    A turn that is pinned to a version goes to workers that serve it, else to those that will;
    others go to workers whose version is at least `least`.

    Raises:
        VersionGoneError: all have gone past the pinned version.
    """
    found = [place for place in places if place.version >= 0]
    if pinned >= 0:
        there = [place for place in found if place.version == pinned]
        soon = [place for place in found if place.version < pinned]
        if found and not there and not soon:
            raise VersionGoneError(f"no rollout worker serves version {pinned}")
        found = there or soon
    else:
        found = [place for place in found if place.version >= least]
    fresh = [p for p in found if p.worker_id not in avoid and p.shunned_until <= now]
    return fresh or found


def pick(
    places: Sequence[Place],
    *,
    pinned: int,
    held: Mapping[str, int],
    worth: float,
    chance: Callable[[], float],
) -> Place | None:
    """The cheapest of two random workers with room and of those that hold a prefix; None: all full.

    A worker costs its tokens in flight, less `worth` for each token of the prefix that it holds
    (`held`, by worker id): it is given up when it has more tokens in flight than the other by more
    than that. Two random ones rather than all: callers that see the same old reports would
    otherwise all run to the same worker. Capacities weigh both chance and cost.
    """
    # A turn for a version to come takes no place before the worker has that version.
    free = [place for place in places if place.has_room or place.version < pinned]
    if not free:
        return None
    largest = max([place.capacity for place in free]) or 1
    drawn = _two(free, [place.capacity or largest for place in free], chance)
    drawn += [place for place in free if place.worker_id in held]

    def cost(place: Place) -> float:
        load = place.tokens * largest / (place.capacity or largest)
        return load - worth * held.get(place.worker_id, 0)

    return min(drawn, key=cost)


def _two(free: Sequence[Place], weights: Sequence[int], chance: Callable[[], float]) -> list[Place]:
    """Two different ones, or the only one."""
    first = _draw(weights, chance())
    if len(free) == 1:
        return [free[first]]
    second = _draw([*weights[:first], *weights[first + 1 :]], chance())
    return [free[first], free[second + (second >= first)]]


def _draw(weights: Sequence[int], u: float) -> int:
    """Index of one of them, in proportion."""
    ends = list(accumulate(weights))
    return bisect_right(ends, u * ends[-1], hi=len(ends) - 1)


class Line(Generic[Item]):
    """Those who wait: queues that take turns, first come first served in each."""

    def __init__(self) -> None:
        self._queues: OrderedDict[Hashable, OrderedDict[Item, None]] = OrderedDict()

    def add(self, queue: Hashable, item: Item) -> None:
        """Stand at the end of a queue."""
        self._queues.setdefault(queue, OrderedDict())[item] = None

    def remove(self, queue: Hashable, item: Item) -> None:
        """Wait no more; no-op for one who does not."""
        waiting = self._queues.get(queue)
        if waiting is not None:
            waiting.pop(item, None)
            if not waiting:
                del self._queues[queue]

    def serve(self, offer: Callable[[Item], bool]) -> None:
        """Offer what there is to the first of each queue in turn, until none of them takes it."""
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
