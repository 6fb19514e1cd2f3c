"""The peers of one transfer: their failures, backoff, and which one to ask next."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.weights.route import ChunkSource
from paceline.weights.stream.chunk_reader import ChunkReader

_BACKOFF_S = 0.02
_MAX_BACKOFF_S = 1.0
_DAMAGED_BACKOFF_S = 10.0
_CONNECT_S = 1.0
_MAX_DOUBLINGS = 3
_TICK_S = 0.1


@dataclass(slots=True)
class Peer:
    """One endpoint. Keeps only the text of errors: tracebacks would keep snapshots alive."""

    num_failures: int = 0
    backoff_until_s: float = 0.0
    damaged: bool = False
    error: str = ""  # the last one
    lacks_until_s: dict[tuple[int, int], float] = field(
        default_factory=dict[tuple[int, int], float]
    )
    readers: set[ChunkReader] = field(default_factory=set[ChunkReader])

    @property
    def connect_s(self) -> float:
        """Connection timeout; it doubles with failures, for a distant or busy peer."""
        return _CONNECT_S * 2 ** min(self.num_failures, _MAX_DOUBLINGS)

    def failed(self, error: str, *, damaged: bool) -> None:
        """Back off after a failure, for longer if the peer sent damaged bytes."""
        self.error = error
        self.num_failures += 1
        self.damaged |= damaged
        backoff_s = min(_BACKOFF_S * 2 ** min(self.num_failures, 16), _MAX_BACKOFF_S)
        self.backoff_until_s = time.monotonic() + (_DAMAGED_BACKOFF_S if damaged else backoff_s)

    def mark_missing(self, share: ChunkSource, error: str) -> None:
        """Back off for these chunks only, which the peer does not hold."""
        self.error = error
        self.lacks_until_s[share.part, share.parts] = time.monotonic() + _MAX_BACKOFF_S

    def retry_at_s(self, share: ChunkSource) -> float:
        """When it may be asked for these chunks again."""
        return max(self.backoff_until_s, self.lacks_until_s.get((share.part, share.parts), 0.0))


class Peers:
    """All endpoints of one transfer."""

    def __init__(self) -> None:
        self._peers: dict[str, Peer] = {}

    def __getitem__(self, endpoint: str) -> Peer:
        return self._peers.setdefault(endpoint, Peer())

    def streams(self) -> list[tuple[str, ChunkReader]]:
        """Open streams with their endpoints."""
        return [(name, reader) for name, peer in self._peers.items() for reader in peer.readers]

    def errors(self) -> list[str]:
        """The last error of each peer."""
        return [peer.error for peer in self._peers.values() if peer.error]

    def any_damaged(self) -> bool:
        """Whether any peer sent damaged bytes."""
        return any(peer.damaged for peer in self._peers.values())

    def reset_backoff(self) -> None:
        """Make all peers eligible again, in the order of the route."""
        for peer in self._peers.values():
            peer.num_failures, peer.backoff_until_s = 0, 0.0
            peer.lacks_until_s.clear()

    def next(self, share: ChunkSource, candidates: Iterable[str]) -> str | None:
        """The candidate with the fewest failures, in the order given; None while all back off.

        Peers that sent damaged bytes come last.
        """
        now = time.monotonic()
        eligible = [
            (peer.damaged, peer.num_failures, position, endpoint)
            for position, endpoint in enumerate(candidates)
            if (peer := self[endpoint]).retry_at_s(share) <= now
        ]
        return min(eligible)[3] if eligible else None

    def next_retry_s(self, share: ChunkSource) -> float:
        """Seconds until a peer may become eligible."""
        now = time.monotonic()
        backoffs = [peer.retry_at_s(share) - now for peer in self._peers.values()]
        return min([_TICK_S, *(backoff for backoff in backoffs if backoff > 0)])
