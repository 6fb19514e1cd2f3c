"""Which requests may run under which policy version, and when a swap may happen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from paceline.errors import InvalidError, PacelineError, StateError
from paceline.interfaces import Generation


class Activation(StrEnum):
    """What a swap does to running requests."""

    IN_FLIGHT = "in_flight"  # they go on, with the cache they have
    INTERRUPT = "interrupt"  # they go on, their prefix is computed again
    AT_BOUNDARY = "at_boundary"  # they finish first, new ones wait


class Queued(Protocol):
    """A request in a line."""

    @property
    def request(self) -> Generation:
        """What was asked for."""
        ...


Item = TypeVar("Item", bound=Queued)


@dataclass(slots=True)
class Swap:
    """A whole snapshot on its way into an engine. `done` cannot be cancelled."""

    snapshot: Any  # or what an engine has made of it, with the same `header`
    activation: Activation
    done: Future[None] = field(default_factory=Future[None])

    def __post_init__(self) -> None:
        self.done.set_running_or_notify_cancel()

    @property
    def version(self) -> int:
        """The policy version it brings."""
        return int(self.snapshot.header.version)

    def fail(self, error: BaseException) -> None:
        """The swap does not happen."""
        self.done.set_exception(error)


class Gate:
    """The active version, the swap that waits for its moment, and those that are made ready."""

    def __init__(self) -> None:
        self.version = -1
        self.pending: Swap | None = None
        self._expected: list[Swap] = []  # at most two: the one in the making and the newest

    def expect(self, swap: Swap) -> None:
        """A swap is to be made ready, one at a time in this order; `propose` it then.

        The one in the making stays, or none would ever be ready where versions come faster than
        they are made. Of those behind it the newest stays.
        """
        waiting = [one for one in (self.pending, *self._expected) if one is not None]
        if self._refuse(swap, waiting):
            return
        if len(self._expected) > 1:
            displaced = self._expected.pop()
            displaced.fail(superseded(displaced.version, swap.version))
        self._expected.append(swap)

    def propose(self, swap: Swap) -> None:
        """Let a swap that is ready wait for its moment; a newer one displaces an older one."""
        self._forget(swap)
        if swap.done.done() or self._refuse(swap, [self.pending] if self.pending else []):
            return
        if self.pending is not None:
            self.pending.fail(superseded(self.pending.version, swap.version))
        self.pending = swap

    def give_up(self, swap: Swap, error: PacelineError) -> None:
        """A swap that was expected cannot be made ready; the old version stays."""
        self._forget(swap)
        if not swap.done.done():
            swap.fail(error)

    def close(self, error: PacelineError) -> None:
        """None of the swaps happens."""
        self.finish(error)
        for swap in list(self._expected):
            self.give_up(swap, error)

    def due(self, *, running: int, pinned: int) -> bool:
        """Whether the waiting swap may happen; `pinned` counts requests held to the version."""
        if self.pending is None or pinned:
            return False
        return not running or self.pending.activation is not Activation.AT_BOUNDARY

    def finish(self, error: PacelineError | None = None) -> None:
        """The waiting swap has happened, or failed and left the old version in place."""
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
        """Whether a request that names no version may start at this moment."""
        waits = self.pending is not None and self.pending.activation is Activation.AT_BOUNDARY
        return self.version >= 0 and not waits

    def _forget(self, swap: Swap) -> None:
        self._expected = [one for one in self._expected if one is not swap]

    def _refuse(self, swap: Swap, waiting: Sequence[Swap]) -> bool:
        """Fail a swap that is older than the active version or than one that waits."""
        newest = max((one.version for one in waiting), default=-1)
        if swap.version < self.version:
            active = f"version {self.version} is active"
            swap.fail(StateError(f"version {swap.version} is too old to load: {active}"))
        elif swap.version < newest:
            swap.fail(superseded(swap.version, newest))
        else:
            return False
        return True


class Line(Generic[Item]):
    """Requests that have not started, by what they wait for."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._free: OrderedDict[str, Item] = OrderedDict()
        self._pinned: OrderedDict[str, Item] = OrderedDict()
        self._later: OrderedDict[str, Item] = OrderedDict()

    def __len__(self) -> int:
        return len(self._free) + len(self._pinned) + len(self._later)

    def __contains__(self, request_id: object) -> bool:
        return any(request_id in part for part in self._parts())

    @property
    def num_pinned(self) -> int:
        """Those that wait for a place under the version that is active."""
        return len(self._pinned)

    def add(self, item: Item, *, first: bool = False) -> bool:
        """Queue at the end, or in front; False if the version it is pinned to is gone."""
        pinned, name = item.request.pinned_version, item.request.request_id
        if 0 <= pinned < self._gate.version:
            return False
        part = self._free
        if pinned >= 0:
            part = self._pinned if pinned == self._gate.version else self._later
        part[name] = item
        if first:
            part.move_to_end(name, last=False)
        return True

    def startable(self) -> Iterator[Item]:
        """Those that may start now, in order; pinned ones first, for a swap may wait for them."""
        yield from self._pinned.values()
        if self._gate.admits_unpinned:
            yield from self._free.values()

    def pop(self, request_id: str) -> Item | None:
        """Take one out."""
        for part in self._parts():
            if request_id in part:
                return part.pop(request_id)
        return None

    def swapped(self) -> list[Item]:
        """Sort again after a swap; returns those whose version is gone."""
        held = [*self._pinned.values(), *self._later.values()]
        self._pinned.clear()
        self._later.clear()
        return [item for item in held if not self.add(item)]

    def clear(self) -> list[Item]:
        """Take all out."""
        found = [item for part in self._parts() for item in part.values()]
        for part in self._parts():
            part.clear()
        return found

    def _parts(self) -> tuple[OrderedDict[str, Item], ...]:
        return (self._pinned, self._free, self._later)


def parse_activation(name: str) -> Activation:
    """The activation of this name; raises `InvalidError`."""
    try:
        return Activation(name)
    except ValueError:
        allowed = ", ".join(Activation)
        raise InvalidError(f"activation: {name!r}; allowed: {allowed}") from None


def superseded(older: int, newer: int) -> StateError:
    """What the awaiter of a displaced swap gets."""
    return StateError(f"version {older} is superseded by version {newer}")
