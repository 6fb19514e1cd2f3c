"""Prometheus metrics of a rollout worker, except those of weight transfers."""

from __future__ import annotations

import time
from collections.abc import Callable

from paceline.enums import WorkerKind
from paceline.platform.telemetry.metrics import Metrics
from paceline.plugins import EngineStatus

COUNTERS = ("tokens", "prompt_tokens", "cached_tokens")


class RolloutGauges:
    """The metrics of one worker; it serves one job."""

    def __init__(
        self, metrics: Metrics, *, job_id: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._job_id = job_id
        self._clock = clock
        self._tokens = 0
        self._since = clock()
        metrics.follow("token_age", lambda: self._clock() - self._since, job=job_id)

    def follow(self, *, lag: Callable[[], float], age_s: Callable[[], float]) -> None:
        """Export how many versions the weights are behind, and how long they have been active."""
        self._metrics.follow("version_lag", lag, job=self._job_id)
        self._metrics.follow("weights_age", age_s, job=self._job_id)

    def show(self, now: EngineStatus) -> None:
        """Export the engine's current counters."""
        job, metrics = self._job_id, self._metrics
        if now.tokens_generated != self._tokens:
            self._tokens, self._since = now.tokens_generated, self._clock()
        counts = (now.tokens_generated, now.prompt_tokens, now.cached_tokens)
        for name, value in zip(COUNTERS, counts, strict=True):
            metrics.total(name, value, job=job)
        metrics.set("requests", now.running, job=job, state="running")
        metrics.set("requests", now.waiting, job=job, state="waiting")
        if now.kv_ratio >= 0:
            metrics.set("kv", now.kv_ratio, job=job)
        # An engine without requests waits for episodes.
        metrics.total(
            "wait",
            now.idle_s,
            service=str(WorkerKind.ROLLOUT),
            waiting_on=str(WorkerKind.ENVIRONMENT),
        )
