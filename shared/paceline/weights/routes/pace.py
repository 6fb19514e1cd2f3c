"""How fast workers get on with a version, seen from what they tell of their progress."""

from __future__ import annotations

from dataclasses import dataclass

_SLOWER = 3.0  # times slower than its sender was: as receivers judge by themselves
_AHEAD_S = 1.0  # of its own pace that a sender must have in hand, else it may be who is late


@dataclass(slots=True)
class _Run:
    version: int
    senders: tuple[str, ...]  # endpoints
    at: float
    num_ready: int
    rate: float = 0.0  # chunks per second, last, from these senders
    peak: float = 0.0  # from any


class Paces:
    """One run by worker: the version of which it told last."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}

    def observe(
        self, name: str, version: int, num_ready: int, *, senders: tuple[str, ...], now: float
    ) -> None:
        """It has so many chunks of a version now, and pulls from these endpoints."""
        run = self._runs.get(name)
        if run is None or run.version != version or num_ready < run.num_ready:
            self._runs[name] = _Run(version, senders, now, num_ready)
        elif run.senders != senders:
            self._runs[name] = _Run(version, senders, now, num_ready, peak=run.peak)
        elif now > run.at and num_ready > run.num_ready:
            run.rate = (num_ready - run.num_ready) / (now - run.at)
            run.peak = max(run.peak, run.rate)
            run.at, run.num_ready = now, num_ready

    def drop(self, name: str) -> None:
        """The worker is gone."""
        self._runs.pop(name, None)

    def lags(self, name: str, sender: str) -> bool:
        """Whether a worker is far slower than its sender was, which has chunks in hand for it.

        Means something within a site only: between sites everybody may be as slow.
        """
        run, other = self._runs.get(name), self._runs.get(sender)
        if run is None or other is None or run.version != other.version or run.rate <= 0:
            return False
        ahead = other.num_ready - run.num_ready
        return run.rate * _SLOWER < other.peak and ahead > run.rate * _AHEAD_S
