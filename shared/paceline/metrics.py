"""Every Prometheus name in one place. Labels: `job` and bounded enumerations only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

Metric = TypeVar("Metric", Counter, Gauge, Histogram)
_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0)

NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    # every service: how busy am I, whom do I wait for, what did I drop
    "busy": ("paceline_busy_seconds", ("job",)),
    "wait": ("paceline_wait_seconds", ("job", "on")),
    "dropped": ("paceline_dropped", ("job", "reason")),
    "rpc": ("paceline_rpc_seconds", ("method", "code")),
    "up": ("paceline_up", ("kind",)),
    "spans": ("paceline_spans", ("outcome",)),
    "refused_calls": ("paceline_refused_calls", ("caller",)),
    "access_refusals": ("paceline_access_refusals", ("reason",)),
    # ledger
    "episodes": ("paceline_episodes", ("job", "state")),
    "step": ("paceline_step", ("job",)),
    "version": ("paceline_version", ("job",)),
    "staleness": ("paceline_staleness_steps", ("job",)),
    "reward": ("paceline_reward", ("job", "purpose")),
    # tenants: bounded by whom admins let in
    "tenant_use": ("paceline_tenant_use", ("tenant", "of")),
    "tenant_quota": ("paceline_tenant_quota", ("tenant", "of")),
    # environment, reward
    "open": ("paceline_open_episodes", ("job",)),
    "queued_tokens": ("paceline_queued_tokens", ("job",)),
    "received_tokens": ("paceline_received_tokens", ("job",)),
    "resumed_tokens": ("paceline_resumed_tokens", ("job", "on")),
    "lost_tokens": ("paceline_lost_tokens", ("job",)),
    "scored": ("paceline_scores", ("job", "status")),
    # rollout
    "tokens": ("paceline_generated_tokens", ("job",)),
    "prompt_tokens": ("paceline_prompt_tokens", ("job",)),
    "requests": ("paceline_requests", ("job", "state")),
    # weights
    "weight_bytes": ("paceline_weight_bytes", ("job", "direction", "kind")),
    "weight_seconds": ("paceline_weight_seconds", ("job", "stage")),
    "weight_events": ("paceline_weight_events", ("job", "event")),
    "weight_version": ("paceline_weight_version", ("job", "state")),
    # controller: how many replicas, and what they follow
    "wanted_replicas": ("paceline_wanted_replicas", ("workload", "job", "pool")),
    "ready_replicas": ("paceline_ready_replicas", ("workload", "job", "pool")),
    "trainer_wait_share": ("paceline_trainer_wait_share", ("job",)),
    "needed_tokens": ("paceline_needed_tokens_per_second", ("job",)),
    "worker_tokens": ("paceline_worker_tokens_per_second", ("job", "pool")),
    "wanted_episodes": ("paceline_wanted_episodes", ("job",)),
    "pending_scores": ("paceline_pending_scores", ("workload",)),
    # tracking: by kind of tracker
    "tracking_rows": ("paceline_tracking_rows", ("tracker",)),
    "tracking_errors": ("paceline_tracking_errors", ("tracker", "reason")),
    "tracking_lag": ("paceline_tracking_lag_seconds", ("tracker",)),
    # trainer
    "trained_tokens": ("paceline_trained_tokens", ("job",)),
    "loss": ("paceline_loss", ("job",)),
}

_HELP = {
    "refused_calls": "Calls refused by the caller's certificate, by its kind.",
    "access_refusals": "Calls of users refused, by reason: missing, invalid, role, tenant.",
    "busy": "Seconds of work.",
    "wait": "Seconds of waiting, by what for.",
    "dropped": "Episodes dropped, by reason.",
    "tenant_use": "What a tenant has: submitted jobs, jobs, rollout workers, episodes.",
    "tenant_quota": "What a tenant may have at most; not there where nothing limits it.",
    "spans": "Spans of traces: sent, not taken, or dropped from a full queue.",
    "queued_tokens": "Tokens of turns that wait for room on a rollout worker.",
    "received_tokens": "Sampled tokens that arrived from rollout workers.",
    "resumed_tokens": "Sampled tokens gone on from elsewhere, by whose failure.",
    "lost_tokens": "Sampled tokens of episodes that had to begin again.",
    "weight_bytes": "Bytes of weights on the network, in or out, full or as differences.",
    "weight_seconds": "Seconds that weights took, by stage.",
    "weight_events": "Troubles and turns of transfers of weights.",
    "weight_version": "Newest version held whole, and the one active.",
    "wanted_replicas": "Replicas that demand asks for.",
    "ready_replicas": "Replicas that answer; rollout workers, with weights.",
    "trainer_wait_share": "Share of its time that the trainer waits for batches.",
    "needed_tokens": "Tokens per second so that the trainer does not wait.",
    "worker_tokens": "Tokens per second of a busy rollout worker.",
    "wanted_episodes": "Episodes that run, wait or would be admitted.",
    "pending_scores": "Answers that wait for their score.",
    "tracking_rows": "Rows of histories that experiment trackers took.",
    "tracking_errors": "Failures of experiment trackers: hung, crashed or refused.",
    "tracking_lag": "Seconds since the tracker that is furthest behind had everything.",
}

disable_created_metrics()


@dataclass(slots=True)
class Metrics:
    """The metrics of one process; each is made when it is first used."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    _made: dict[str, Counter | Gauge | Histogram] = field(
        default_factory=dict[str, Counter | Gauge | Histogram]
    )

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Raise a counter."""
        self._get(name, Counter).labels(**labels).inc(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self._get(name, Gauge).labels(**labels).set(value)

    def observe(self, name: str, values: float | Iterable[float], **labels: str) -> None:
        """Put values into a histogram."""
        child = self._get(name, Histogram).labels(**labels)
        for value in [values] if isinstance(values, (int, float)) else values:
            child.observe(value)

    def drop(self, name: str, **labels: str) -> None:
        """Forget a gauge with these labels: what it told of is gone."""
        gauge = self._get(name, Gauge)
        gauge.remove(*(labels[label] for label in NAMES[name][1]))

    def _get(self, name: str, cls: type[Metric]) -> Metric:
        if name not in self._made:
            full, labels = NAMES[name]
            text = _HELP.get(name, full.removeprefix("paceline_").replace("_", " "))
            if cls is Histogram:
                made = Histogram(full, text, labels, registry=self.registry, buckets=_SECONDS)
            else:
                made = cls(full, text, labels, registry=self.registry)
            self._made[name] = made
        found = self._made[name]
        if not isinstance(found, cls):
            raise TypeError(f"{name} is a {type(found).__name__}, not a {cls.__name__}")
        return found
