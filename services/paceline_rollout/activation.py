"""Decides which requests may run under which policy version, and when a swap may happen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from paceline.errors import InvalidError, PacelineError, StateError
from paceline.plugins import EngineRequest


class Activation(StrEnum):
    """How running requests continue across a swap."""

    IN_FLIGHT = "in_flight"  # they continue with their present cache
    INTERRUPT = "interrupt"  # they continue after a new prefill
    AT_BOUNDARY = "at_boundary"  # they finish first, new ones wait


class Queued(Protocol):
    """An item of a `RequestQueue`."""

    @property
    def request(self) -> EngineRequest:
        """The request itself."""
        ...


Item = TypeVar("Item", bound=Queued)


@dataclass(slots=True)
class Swap:
    """A complete snapshot to be loaded into an engine. `done` cannot be cancelled."""

    snapshot: Any  # or what the engine has prepared from it, with the same `header`
    activation: Activation
    back: bool = False  # to an older version than the active one
    done: Future[None] = field(default_factory=Future[None])

    @classmethod
    def back_to(cls, snapshot: Any) -> Swap:
        """To older weights: requests that run with refused ones are computed anew."""
        return cls(snapshot, Activation.INTERRUPT, back=True)

    def __post_init__(self) -> None:
        self.done.set_running_or_notify_cancel()

    @property
    def version(self) -> int:
        """The policy version of the snapshot."""
        return int(self.snapshot.header.version)

    def fail(self, error: BaseException) -> None:
        """Cancel the swap."""
        self.done.set_exception(error)


class Gate:
    """The active version, the pending swap, and the swaps that are being prepared."""

    def __init__(self) -> None:
        self.version = -1
        self.pending: Swap | None = None
        self._expected: list[Swap] = []  # at most two: the one being prepared and the newest

    def expect(self, swap: Swap) -> None:
        """Announce a swap that will be prepared, one at a time in this order; `propose` it then.

        The one that is being prepared stays: otherwise, if versions arrive faster than they are
        prepared, none would ever be ready. Of those behind it only the newest stays.
        """
        waiting = [one for one in (self.pending, *self._expected) if one is not None]
        if self._refuse(swap, waiting):
            return
        if len(self._expected) > 1:
            displaced = self._expected.pop()
            displaced.fail(superseded_error(displaced.version, swap.version))
        self._expected.append(swap)

    def propose(self, swap: Swap) -> None:
        """Make a prepared swap the pending one; a newer swap displaces an older one."""
        self._remove_expected(swap)
        if swap.done.done() or self._refuse(swap, [self.pending] if self.pending else []):
            return
        if self.pending is not None:
            self.pending.fail(superseded_error(self.pending.version, swap.version))
        self.pending = swap

    def give_up(self, swap: Swap, error: PacelineError) -> None:
        """Fail an expected swap that cannot be prepared; the old version stays."""
        self._remove_expected(swap)
        if not swap.done.done():
            swap.fail(error)

    def close(self, error: PacelineError) -> None:
        """Fail all swaps."""
        self.finish(error)
        for swap in list(self._expected):
            self.give_up(swap, error)

    def due(self, *, running: int, pinned: int) -> bool:
        """Whether the pending swap may happen; `pinned` counts requests pinned to the version."""
        if self.pending is None or pinned:
            return False
        return not running or self.pending.activation is not Activation.AT_BOUNDARY

    def finish(self, error: PacelineError | None = None) -> None:
        """Complete the pending swap; with an error, the old version stays."""
        swap, self.pending = self.pending, None
        if swap is None:
            return
        if error is not None:
            swap.fail(error)
            return
        self.version = swap.version
        swap.done.set_result(None)

    @property
    def admits_unpinned(self) -> bool:
        """Whether an unpinned request may start."""
        waits = self.pending is not None and self.pending.activation is Activation.AT_BOUNDARY
        return self.version >= 0 and not waits

    def _remove_expected(self, swap: Swap) -> None:
        self._expected = [one for one in self._expected if one is not swap]

    def _refuse(self, swap: Swap, waiting: Sequence[Swap]) -> bool:
        """Fail a swap that is older than a waiting one, or than the active version unbidden."""
        newest = max((one.version for one in waiting), default=-1)
        if swap.version < self.version and not swap.back:
            active = f"version {self.version} is active"
            swap.fail(StateError(f"version {swap.version} is too old to load: {active}"))
        elif swap.version < newest:
            swap.fail(superseded_error(swap.version, newest))
        else:
            return False
        return True


class RequestQueue(Generic[Item]):
    """Requests that have not started: unpinned, pinned to the active version, to a future one."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._unpinned: OrderedDict[str, Item] = OrderedDict()
        self._pinned: OrderedDict[str, Item] = OrderedDict()
        self._future: OrderedDict[str, Item] = OrderedDict()

    def __len__(self) -> int:
        return len(self._unpinned) + len(self._pinned) + len(self._future)

    def __contains__(self, request_id: object) -> bool:
        return any(request_id in queue for queue in self._queues())

    @property
    def num_pinned(self) -> int:
        """Requests that wait for a slot under the active version."""
        return len(self._pinned)

    def add(self, item: Item, *, first: bool = False) -> bool:
        """Queue at the end, or in front if `first`; False if its pinned version is gone."""
        pinned, name = item.request.pinned_version, item.request.request_id
        if 0 <= pinned < self._gate.version:
            return False
        queue = self._unpinned
        if pinned >= 0:
            queue = self._pinned if pinned == self._gate.version else self._future
        queue[name] = item
        if first:
            queue.move_to_end(name, last=False)
        return True

    def startable(self) -> Iterator[Item]:
        """Requests that may start, in order; pinned ones first, as a swap may wait for them."""
        yield from self._pinned.values()
        if self._gate.admits_unpinned:
            yield from self._unpinned.values()

    def pop(self, request_id: str) -> Item | None:
        """Remove a request; None if it is not queued."""
        for queue in self._queues():
            if request_id in queue:
                return queue.pop(request_id)
        return None

    def swapped(self) -> list[Item]:
        """Requeue after a swap; returns requests whose version is gone."""
        pinned = [*self._pinned.values(), *self._future.values()]
        self._pinned.clear()
        self._future.clear()
        return [item for item in pinned if not self.add(item)]

    def clear(self) -> list[Item]:
        """Remove and return all requests."""
        items = [item for queue in self._queues() for item in queue.values()]
        for queue in self._queues():
            queue.clear()
        return items

    def _queues(self) -> tuple[OrderedDict[str, Item], ...]:
        return (self._pinned, self._unpinned, self._future)


def parse_activation(name: str) -> Activation:
    """The activation of this name; raises `InvalidError`."""
    try:
        return Activation(name)
    except ValueError:
        allowed = ", ".join(Activation)
        raise InvalidError(f"activation: {name!r}; allowed: {allowed}") from None


def superseded_error(older: int, newer: int) -> StateError:
    """The error of a swap that a newer one displaces."""
    return StateError(f"version {older} is superseded by version {newer}")
