"""Clients and settings that all episodes of a worker share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.telemetry.tracing import OFF, Tracer
from paceline_environment.episodes.calls import EnvironmentCalls
from paceline_environment.rollouts.failover import PolicyClient
from paceline_environment.scoring import Scoring
from paceline_environment.stages import Stages


@dataclass(frozen=True, slots=True)
class EpisodePeers:
    """Clients and instruments that all episodes of a worker share."""

    worker_id: str
    policy: PolicyClient
    scoring: Scoring
    stages: Stages
    calls: EnvironmentCalls
    metrics: Metrics
    clock: Callable[[], float] = time.monotonic
    tracer: Tracer = OFF
