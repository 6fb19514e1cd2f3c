"""Liveness of a rollout worker: tokens, and weights that are recent enough."""

from __future__ import annotations

from typing import Any

from paceline.platform.server.liveness import ProcessProgress, WorkProgress
from paceline.plugins import Engine
from paceline_rollout.streams import StreamMultiplexer
from paceline_rollout.weight_updater import WeightUpdater


class RolloutLiveness:
    """The work that a worker's probes watch; `max_lag` is in steps of the trainer."""

    def __init__(
        self,
        *,
        engine: Engine,
        multiplexer: StreamMultiplexer,
        updater: WeightUpdater,
        max_lag: int,
    ) -> None:
        self._engine = engine
        self._multiplexer = multiplexer
        self._updater = updater
        self._max_lag = max_lag

    def register(self, progress: ProcessProgress) -> None:
        """Register the work of this worker with its probes."""
        progress.watch("tokens", self.tokens)
        # Not fatal: a restart would fetch the same weights from the same peers, from the start.
        progress.watch("weights", self.weights, fatal=False)
        progress.add_status(self.status)

    def tokens(self) -> WorkProgress:
        """Requests that the engine could work on, and their results.

        Requests without weights, or for a version that is not loaded yet, are only waiting.
        """
        now = self._engine.status()
        pending = max(self._multiplexer.load()["open"], now.running) if now.version >= 0 else 0
        done = (now.tokens_generated, now.prompt_tokens, now.version, self._multiplexer.num_ended)
        return WorkProgress(pending, done)

    def weights(self) -> WorkProgress:
        """Steps behind the newest version that was routed here, if more than `max_lag`."""
        active = self._updater.active
        behind = self.lag if active.version >= 0 else 0
        return WorkProgress(behind if behind > self._max_lag else 0, active.version)

    @property
    def lag(self) -> int:
        """Steps of the trainer between the newest version and the active one."""
        return max(0, self._updater.newest.step - self._updater.active.step)

    def status(self) -> dict[str, Any]:
        """Fields for `/statusz`."""
        return {
            "version": self._updater.active.version,
            "newest_version": self._updater.newest.version,
            "version_lag": self.lag,
        }
