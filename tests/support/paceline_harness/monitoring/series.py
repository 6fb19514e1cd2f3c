"""All series that a worker can export, to bound the cost of a scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from paceline.platform.telemetry.metric_names import NAMES, VALUES
from paceline.platform.telemetry.metrics import Metrics

MOST_SERIES = 43
"""Of one worker."""

Choices = Mapping[str, tuple[str, ...]]
SENT = {"outcome": ("sent", "failed", "dropped")}
PARTS = tuple(f"part-{number}" for number in range(int(str(VALUES["part"])) + 1))
WEIGHTS: dict[str, Choices] = {
    "weight_bytes": {"direction": ("in", "out"), "kind": ("full", "delta", "shared")},
    "weight_seconds": {"stage": ("pull", "encode", "decode", "digest", "swap")},
    "weight_events": {"event": ("stalled", "slow", "failed", "damaged", "superseded")},
}
EVERY: dict[str, Choices] = {
    "build": {"version": ("1",)},
    "busy": {},
    "capacity": {},
    "stalled": {},
    "spans": SENT,
    "refused_calls": {"caller": ("somebody",)},
}
CODE: dict[str, Choices] = {"code_processes_waiting": {}}
SAYS: dict[str, dict[str, Choices]] = {
    "environment": {
        **EVERY,
        "wait": {"waiting_on": ("experience", "rollout", "reward", "environment")},
        "open": {"purpose": ("train", "eval")},
        "finished": {},
        "given_back": {"cause": ("infra_error", "invalid", "version_gone", "drain")},
        "calls": {"call": ("reset", "step", "close")},
        "call_seconds": {"call": ("reset", "step", "close")},
        "queued_tokens": {},
        "received_tokens": {},
        "resumed_tokens": {"failed_service": ("rollout", "environment")},
        "lost_tokens": {},
        **CODE,
        "package_cache_bytes": {},
        "package_installs_waiting": {},
    },
    "reward": {
        **EVERY,
        "wait": {"waiting_on": ("environment",)},
        "rpcs": {"method": ("Score",), "outcome": ("ok", "error")},
        "rpc_seconds": {"method": ("Score",)},
        "scored": {"status": ("ok", "parse_error", "timeout", "infra_error")},
        "part_seconds": {"part": PARTS},
        "part_scores": {"part": PARTS},
        "scores_in_progress": {},
        **CODE,
    },
    "rollout": {
        **EVERY,
        **WEIGHTS,
        "wait": {"waiting_on": ("experience", "environment", "weights")},
        "tokens": {},
        "prompt_tokens": {},
        "cached_tokens": {},
        "kv": {},
        "requests": {"state": ("running", "waiting")},
        "version_lag": {},
        "weights_age": {},
        "token_age": {},
        "weight_version": {"state": ("held", "active")},
        "weight_canary_ratio": {},
    },
    "trainer": {
        **EVERY,
        **WEIGHTS,
        "wait": {"waiting_on": ("experience", "environment")},
        "phase_seconds": {"phase": ("waiting", "stepping", "checkpointing", "publishing", "other")},
        "damaged_checkpoints": {},
        "rank_tokens": {},
        "fed_tokens": {},
        "mfu": {},
        "memory": {"memory": ("allocated", "peak")},
    },
}
"""Kind of worker -> metric -> possible label values, besides its own service and job."""


def said(kind: str, job: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Every series of a worker, as metric name and labels."""
    for name, choices in SAYS[kind].items():
        own = {"service": (kind,), "job": (job,)}
        labels = NAMES[name].labels
        values = [choices.get(label, own.get(label, ())) for label in labels]
        for each in product(*values):
            yield name, dict(zip(labels, each, strict=True))


def worst(kind: str, job: str) -> Metrics:
    """The metrics of a worker that exports all of its possible series."""
    metrics = Metrics()
    metrics.watch_process()
    for name, labels in said(kind, job):
        if NAMES[name].kind == "counter":
            metrics.add(name, 1.0, **labels)
        else:
            metrics.set(name, 1.0, **labels)
    return metrics


def num_series(metrics: Metrics) -> int:
    """Number of series in a scrape of this process."""
    return sum(len(family.samples) for family in metrics.registry.collect())
