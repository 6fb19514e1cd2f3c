"""What a rollout worker should be getting on with: tokens, and weights that are new enough."""

from __future__ import annotations

from typing import Any

from paceline.interfaces import Engine
from paceline.progress import Progress, Pulse
from paceline_rollout.streams import Hub
from paceline_rollout.worker import Follower


class Vitals:
    """One worker, as its probes see it; `max_lag` in steps of the trainer."""

    def __init__(self, *, engine: Engine, hub: Hub, follower: Follower, max_lag: int) -> None:
        self._engine = engine
        self._hub = hub
        self._follower = follower
        self._max_lag = max_lag

    def register(self, progress: Progress) -> None:
        """Let the probes look."""
        progress.watch("tokens", self.tokens)
        # A restart would fetch the same weights from the same peers, and all of them.
        progress.watch("weights", self.weights, fatal=False)
        progress.tell(self.facts)

    def tokens(self) -> Pulse:
        """Requests that the engine could work on, and all that comes of them.

        Without weights, and for a version that is not here yet, they only wait.
        """
        now = self._engine.status()
        pending = max(self._hub.load()["open"], now.running) if now.version >= 0 else 0
        done = (now.tokens_generated, now.prompt_tokens, now.version, self._hub.num_ended)
        return Pulse(pending, done)

    def weights(self) -> Pulse:
        """Steps behind the newest version that this worker was told of, beyond the bound."""
        active = self._follower.active
        behind = self.lag if active.version >= 0 else 0
        return Pulse(behind if behind > self._max_lag else 0, active.version)

    @property
    def lag(self) -> int:
        """Steps of the trainer between the newest version and the active one."""
        return max(0, self._follower.newest.step - self._follower.active.step)

    def facts(self) -> dict[str, Any]:
        """For people."""
        return {
            "version": self._follower.active.version,
            "newest_version": self._follower.newest.version,
            "version_lag": self.lag,
        }
