"""What one transfer knows of those whom it asks."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.weights.inlet import Inlet
from paceline.weights.route import Source

_PAUSE_S = 0.02
_MAX_PAUSE_S = 1.0
_DAMAGED_PAUSE_S = 10.0  # and only if there is nobody else
_CONNECT_S = 1.0
_MAX_DOUBLINGS = 3
_TICK_S = 0.1


@dataclass(slots=True)
class Peer:
    """One endpoint. Of errors only the text: their tracebacks would keep whole snapshots."""

    num_failures: int = 0
    pause_until_s: float = 0.0
    damaged: bool = False
    error: str = ""  # the last one
    lacks: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    inlets: set[Inlet] = field(default_factory=set[Inlet])

    @property
    def connect_s(self) -> float:
        """How long it may take to answer: one that is far or busy is given more time."""
        return _CONNECT_S * 2 ** min(self.num_failures, _MAX_DOUBLINGS)

    def failed(self, error: str, *, damaged: bool) -> None:
        """It is not asked for a while; who sent damaged bytes for long."""
        self.error = error
        self.num_failures += 1
        self.damaged |= damaged
        pause_s = min(_PAUSE_S * 2 ** min(self.num_failures, 16), _MAX_PAUSE_S)
        self.pause_until_s = time.monotonic() + (_DAMAGED_PAUSE_S if damaged else pause_s)

    def has_not(self, share: Source, error: str) -> None:
        """It is not asked for these chunks for a while; for others it is as good as before."""
        self.error = error
        self.lacks[share.part, share.parts] = time.monotonic() + _MAX_PAUSE_S

    def free_s(self, share: Source) -> float:
        """When it may be asked for these chunks."""
        return max(self.pause_until_s, self.lacks.get((share.part, share.parts), 0.0))


class Peers:
    """All endpoints of one transfer."""

    def __init__(self) -> None:
        self._peers: dict[str, Peer] = {}

    def __getitem__(self, endpoint: str) -> Peer:
        return self._peers.setdefault(endpoint, Peer())

    def streams(self) -> list[tuple[str, Inlet]]:
        """Open ones, with their endpoints."""
        return [(name, inlet) for name, peer in self._peers.items() for inlet in peer.inlets]

    def errors(self) -> list[str]:
        """The last one of each."""
        return [peer.error for peer in self._peers.values() if peer.error]

    def any_damaged(self) -> bool:
        """Whether one sent damaged bytes."""
        return any(peer.damaged for peer in self._peers.values())

    def forgive(self) -> None:
        """Ask all again, in the order of the route."""
        for peer in self._peers.values():
            peer.num_failures, peer.pause_until_s = 0, 0.0
            peer.lacks.clear()

    def next(self, share: Source, candidates: Iterable[str]) -> str | None:
        """Whom to ask: who failed least, in the order given; None while all pause.

        Who sent damaged bytes is the last.
        """
        now = time.monotonic()
        able = [
            (peer.damaged, peer.num_failures, place, endpoint)
            for place, endpoint in enumerate(candidates)
            if (peer := self[endpoint]).free_s(share) <= now
        ]
        return min(able)[3] if able else None

    def pause_s(self, share: Source) -> float:
        """How long until the next look for somebody to ask."""
        now = time.monotonic()
        pauses = [peer.free_s(share) - now for peer in self._peers.values()]
        return min([_TICK_S, *(pause for pause in pauses if pause > 0)])
