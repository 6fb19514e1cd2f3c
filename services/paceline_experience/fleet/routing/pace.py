"""How fast workers receive a version, judged from the progress that they report."""

from __future__ import annotations

from dataclasses import dataclass

_SLOWER = 3.0  # times slower than its sender was; receivers use the same factor
_AHEAD_S = (
    1.0  # seconds of the receiver's rate that the sender must be ahead, else it may be the slow one
)


@dataclass(slots=True)
class _Run:
    version: int
    senders: tuple[str, ...]  # endpoints
    at: float
    num_ready: int
    rate: float = 0.0  # chunks per second, latest, from these senders
    peak: float = 0.0  # from any senders


class Paces:
    """One run per worker: the version that it reported last."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}

    def observe(
        self, name: str, version: int, num_ready: int, *, senders: tuple[str, ...], now: float
    ) -> None:
        """A worker has `num_ready` chunks of a version and pulls from the endpoints `senders`."""
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
        """Whether a worker is far slower than its sender was, though the sender is ahead of it.

        Only meaningful within a site: between sites everybody may be as slow.
        """
        run, other = self._runs.get(name), self._runs.get(sender)
        if run is None or other is None or run.version != other.version or run.rate <= 0:
            return False
        ahead = other.num_ready - run.num_ready
        return run.rate * _SLOWER < other.peak and ahead > run.rate * _AHEAD_S
