"""Every Prometheus metric: name, kind, labels, exporting services and help text.

Labels are `job` (live jobs only) and those of `VALUES`, which are bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.enums import DropReason, EpisodeState, JobState, WorkerKind

Kind = Literal["counter", "gauge", "histogram"]
SERVICES = tuple(str(kind) for kind in WorkerKind)
WORKERS = ("environment", "reward", "rollout", "trainer")
_CODE = "experience environment"
ALL = ("all",)
OTHER = "other"  # replaces a label value beyond the limit in `VALUES`


@dataclass(frozen=True, slots=True)
class Spec:
    """One metric. A name that ends in `_total` is a counter; seconds and bytes are units."""

    kind: Kind
    name: str
    labels: tuple[str, ...]
    services: tuple[str, ...]
    text: str
    buckets: tuple[float, ...] = ()


def _counter(name: str, labels: str, services: str, text: str) -> Spec:
    return Spec("counter", f"paceline_{name}_total", *_split(labels, services), text)


def _gauge(name: str, labels: str, services: str, text: str) -> Spec:
    return Spec("gauge", f"paceline_{name}", *_split(labels, services), text)


def _split(labels: str, services: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(labels.split()), tuple(services.split())


# Allowed values of each label, or the maximum number of distinct ones per process and job.
VALUES: dict[str, tuple[str, ...] | int] = {
    "service": SERVICES,
    "waiting_on": (*SERVICES, "store", "weights"),
    "failed_service": ("environment", "rollout"),
    "kind": ("full", "delta", "shared"),
    "state": (
        *(str(state) for state in EpisodeState),
        *(str(state) for state in JobState),
        *("open", "headroom", "running", "waiting", "held", "active"),
    ),
    "reason": (
        *(str(reason) for reason in DropReason),
        *("hung", "crashed", "refused", "missing", "role", "tenant"),
    ),
    "cause": ("infra_error", "invalid", "oversized", "version_gone", "drain"),
    "purpose": ("train", "eval"),
    "outcome": ("ok", "error", "sent", "failed", "dropped"),
    "variance": ("zero", "some"),
    "call": ("reset", "step", "close"),
    "status": ("ok", "parse_error", "timeout", "infra_error"),
    "phase": ("waiting", "stepping", "checkpointing", "publishing", "other"),
    "memory": ("allocated", "peak"),
    "direction": ("in", "out"),
    "stage": ("pull", "encode", "decode", "digest", "swap"),
    "event": ("stalled", "slow", "failed", "damaged", "superseded"),
    "episode_stage": ("generate", "environment", "reward", "other"),
    "workload": ("environment", "reward", "rollout"),
    "worker": 64,  # rollout workers of a job
    "statistic": 29,  # of an objective
    "part": 8,  # of a reward
    "evaluation": 8,
    "score": 8,  # of an evaluation: reward, pass@k, maj@k
    "pool": 16,  # of an installation
    "method": 64,  # of a service
    "version": 1,
    "tenant": 256,  # of an installation
    "resource": 16,  # what a quota limits
    "tracker": 16,  # installed kinds
    "caller": 16,  # kinds of service, `several` or `none`
}

NAMES: dict[str, Spec] = {
    # every service: utilization, and time spent waiting for others
    "build": _gauge(
        "build_info", "service version", "all", "Always 1; labels show the service and its version."
    ),
    "busy": _counter(
        "busy_seconds",
        "service",
        "all",
        "Seconds of capacity in use: slots with an open episode (environment), time with requests "
        "in the engine (rollout), time with a call in progress (reward), steps, checkpoints and "
        "publications (trainer), CPU time of the event loop (other services).",
    ),
    "capacity": _gauge(
        "capacity",
        "service",
        "all",
        "Maximum of concurrent use: the slots of an environment worker, else 1.",
    ),
    "wait": _counter(
        "wait_seconds",
        "service waiting_on",
        "all",
        "Seconds that open episodes, ranks or calls of this process waited for another service, "
        "including waits in progress; time in which the process did not run does not count.",
    ),
    "stalled": _counter(
        "stalled_seconds",
        "service",
        "all",
        "Seconds in which the event loop was blocked: the process was suspended, starved of CPU, "
        "or busy with a blocking call.",
    ),
    "handling": _counter(
        "handling_seconds",
        "service",
        "gateway experience",
        "Seconds with at least one call of a client in progress; streams do not count.",
    ),
    "rpcs": _counter("rpcs", "method outcome", "all", "Unary calls answered, by outcome."),
    "rpc_seconds": _counter("rpc_seconds", "method", "all", "Seconds spent in unary calls."),
    "spans": _counter(
        "spans", "outcome", "all", "Trace spans sent, failed to send, or dropped from a full queue."
    ),
    "refused_calls": _counter(
        "refused_calls",
        "caller",
        "all",
        "Calls refused for the caller's certificate, by kind of caller.",
    ),
    "access_refusals": _counter(
        "access_refusals",
        "reason",
        "gateway",
        "User calls refused, by reason: missing, invalid, attempts, calls, role, tenant.",
    ),
    # tracking
    "tracking_rows": _counter(
        "tracking_rows", "tracker", "tracking", "Metric rows accepted by experiment trackers."
    ),
    "tracking_errors": _counter(
        "tracking_errors",
        "tracker reason",
        "tracking",
        "Failures of experiment trackers: hung, crashed or refused.",
    ),
    "tracking_lag": _gauge(
        "tracking_lag_seconds",
        "tracker",
        "tracking",
        "Seconds since the tracker that is furthest behind was up to date.",
    ),
    # tenants
    "tenant_usage": _gauge(
        "tenant_usage",
        "tenant resource",
        "experience",
        "Usage of a tenant: submitted jobs, jobs, rollout workers, episodes, bytes in the store; "
        "bytes are the maximum of the last hour or two.",
    ),
    "tenant_quota": _gauge(
        "tenant_quota", "tenant resource", "experience", "Quota of a tenant; absent if unlimited."
    ),
    # jobs
    "jobs": _gauge("jobs", "state", "experience", "Live jobs by state."),
    "job_wait_seconds": _counter(
        "job_wait_seconds",
        "job waiting_on",
        "experience",
        "Seconds of live jobs by what they wait for: controller (trainer not started yet), trainer "
        "(starting, training or lost), environment (batch not ready), store (not answering).",
    ),
    # ledger
    "episodes": _gauge("episodes", "job state", "experience", "Training episodes by state."),
    "admitted": _counter("admitted_episodes", "job", "experience", "Episodes created."),
    "trained_episodes": _counter("trained_episodes", "job", "experience", "Episodes trained on."),
    "dropped": _counter("dropped_episodes", "job reason", "experience", "Episodes dropped."),
    "attempts": _counter("attempts", "job", "experience", "Leases granted."),
    "expired": _counter("leases_expired", "job", "experience", "Leases that expired."),
    "groups": _gauge(
        "groups",
        "job state",
        "experience",
        "Groups that are open, ready for a batch, or could be admitted now (headroom).",
    ),
    "finished_groups": _counter(
        "finished_groups", "job variance", "experience", "Groups by whether their rewards vary."
    ),
    "ledger_inconsistent": _gauge(
        "ledger_inconsistent", "job", "experience", "1 if the ledger's counts do not add up."
    ),
    "ledger_problems": _gauge(
        "ledger_problems",
        "job",
        "experience",
        "Problems found by the last verification of the ledger, which runs every minute.",
    ),
    "store_losses": _counter(
        "store_losses", "job", "experience", "How often the store lost its latest writes."
    ),
    "payload_bytes": _gauge("payload_bytes", "job", "experience", "Bytes of trajectories stored."),
    "step": _gauge("step", "job", "experience", "Optimiser steps trained."),
    "version": _gauge("version", "job", "experience", "Newest version published; -1: none."),
    "sampled_tokens": _counter(
        "sampled_tokens", "job purpose", "experience", "Policy tokens submitted."
    ),
    "trained_tokens": _counter("trained_tokens", "job", "experience", "Policy tokens trained on."),
    "episode_seconds": _counter(
        "episode_seconds",
        "job episode_stage",
        "experience",
        "Seconds of submitted episodes by stage, measured by the environment worker.",
    ),
    "submitted": _counter(
        "submitted_episodes", "job purpose", "experience", "Trajectories accepted."
    ),
    "sample_age": _gauge(
        "sample_age_seconds", "job", "experience", "Seconds since the last trajectory was accepted."
    ),
    "damaged_checkpoints": _gauge(
        "damaged_checkpoints",
        "job",
        "trainer",
        "Damaged checkpoints that the trainer skipped when it started.",
    ),
    "checkpoint_age": _gauge(
        "checkpoint_age_seconds",
        "job",
        "experience",
        "Seconds since the last durable checkpoint, or since this service opened the job.",
    ),
    "trainer_waiting": _gauge(
        "trainer_waiting_seconds",
        "job",
        "experience",
        "Seconds the trainer has been waiting for its batch.",
    ),
    # the last batch
    "reward": _gauge(
        "reward_mean", "job purpose", "experience", "Mean reward of the last batch or evaluation."
    ),
    "eval_score": _gauge(
        "eval_score", "job evaluation score", "experience", "Of the last complete evaluation."
    ),
    "reward_std": _gauge("reward_std", "job", "experience", "Standard deviation, last batch."),
    "reward_part": _gauge(
        "reward_part_mean", "job part", "experience", "Mean of each reward component, last batch."
    ),
    "group_std": _gauge(
        "group_reward_std", "job", "experience", "Standard deviation within groups, averaged."
    ),
    "zero_variance": _gauge(
        "zero_variance_ratio",
        "job",
        "experience",
        "Share of groups in the last batch whose rewards are all equal.",
    ),
    "response": _gauge("response_tokens_mean", "job", "experience", "Policy tokens per episode."),
    "response_max": _gauge("response_tokens_max", "job", "experience", "Maximum, last batch."),
    "truncated": _gauge("truncated_ratio", "job", "experience", "Share of truncated episodes."),
    "parse_errors": _gauge("parse_error_ratio", "job", "experience", "Share without an answer."),
    "score_timeouts": _gauge("score_timeout_ratio", "job", "experience", "Share scored too late."),
    "staleness_mean": _gauge("staleness_steps_mean", "job", "experience", "Of the last batch."),
    "batch_versions": _gauge("batch_versions", "job", "experience", "Versions in the last batch."),
    "staleness": Spec(
        "histogram",
        "paceline_staleness_steps",
        ("job",),
        ("experience",),
        "Trained samples by age in optimiser steps.",
        buckets=(0, 1, 2, 4, 8, 16),
    ),
    # the last optimiser step, as committed by the trainer
    "loss": _gauge("loss", "job", "experience", "Loss of the last optimiser step."),
    "grad_norm": _gauge("grad_norm", "job", "experience", "Gradient norm before clipping."),
    "lr": _gauge("learning_rate", "job", "experience", "Of the last step."),
    "objective": _gauge(
        "objective",
        "job statistic",
        "experience",
        "Statistics of the objective: entropy_estimate, clip_fraction, kl_behaviour, ess, ...",
    ),
    # trainer
    "phase_seconds": _counter("trainer_seconds", "job phase", "trainer", "Seconds by phase."),
    "rank_tokens": _counter(
        "trainer_tokens", "job", "trainer", "Policy tokens trained, all ranks (exported by rank 0)."
    ),
    "fed_tokens": _counter(
        "fed_tokens",
        "job",
        "trainer",
        "Tokens through the model, including prompts and idle batches.",
    ),
    "mfu": _gauge(
        "mfu_ratio",
        "job",
        "trainer",
        "Model FLOPs utilization of the last step; absent if the peak is unknown.",
    ),
    "memory": _gauge(
        "accelerator_memory_bytes",
        "job memory",
        "trainer",
        "Device memory of this rank; absent on CPU.",
    ),
    # environment
    "open": _gauge("open_episodes", "purpose", "environment", "Episodes leased and running."),
    "finished": _counter("finished_episodes", "", "environment", "Episodes submitted."),
    "given_back": _counter("given_back_episodes", "cause", "environment", "Leases returned."),
    "calls": _counter("environment_calls", "call", "environment", "Calls to environments."),
    "call_seconds": _counter(
        "environment_call_seconds", "call", "environment", "Seconds in calls."
    ),
    "queued_tokens": _gauge(
        "queued_tokens",
        "",
        "environment",
        "Tokens of turns that wait for capacity on a rollout worker.",
    ),
    "received_tokens": _counter(
        "received_tokens", "", "environment", "Sampled tokens that arrived from rollout workers."
    ),
    "resumed_tokens": _counter(
        "resumed_tokens",
        "failed_service",
        "environment",
        "Sampled tokens reused when a turn resumed elsewhere, by which service failed.",
    ),
    "lost_tokens": _counter(
        "lost_tokens", "", "environment", "Sampled tokens of episodes that had to restart."
    ),
    # reward
    "scored": _counter("scores", "status", "reward", "Responses scored, by status."),
    "part_seconds": _counter("score_seconds", "part", "reward", "Seconds per reward component."),
    "part_scores": _counter("part_scores", "part", "reward", "Responses scored per component."),
    "scores_in_progress": _gauge(
        "scores_in_progress", "", "reward", "Scores in progress or queued."
    ),
    # environment, reward and experience
    "code_processes_waiting": _gauge(
        "code_processes_waiting", "", f"reward {_CODE}", "Over max_code_processes, waiting."
    ),
    # experience and environment
    "package_cache_bytes": _gauge(
        "package_cache_bytes", "", _CODE, "Packages that jobs require, of all workers of a machine."
    ),
    "package_installs_waiting": _gauge(
        "package_installs_waiting", "", _CODE, "Installations of packages that wait for others."
    ),
    # rollout
    "tokens": _counter("generated_tokens", "job", "rollout", "Tokens sampled."),
    "prompt_tokens": _counter("prompt_tokens", "job", "rollout", "Tokens prefilled."),
    "cached_tokens": _counter(
        "cached_tokens", "job", "rollout", "Prompt tokens found in the prefix cache."
    ),
    "kv": _gauge(
        "kv_cache_ratio",
        "job",
        "rollout",
        "Share of the KV cache in use; absent where the engine does not report it.",
    ),
    "requests": _gauge("requests", "job state", "rollout", "Requests in the engine."),
    "version_lag": _gauge(
        "version_lag", "job", "rollout", "Versions behind the newest one that was announced."
    ),
    "lag_bound": _gauge(
        "version_lag_bound",
        "job",
        "experience",
        "Versions that a rollout worker may be behind: max_staleness / publish_every.",
    ),
    "weights_age": _gauge(
        "weights_age_seconds", "job", "rollout", "Seconds since the weights became active."
    ),
    "token_age": _gauge("token_age_seconds", "job", "rollout", "Seconds since the last token."),
    # weights
    "weight_bytes": _counter(
        *("weight_bytes", "job direction kind", "rollout trainer"),
        "Bytes of weights sent and received; shared: in memory that both map.",
    ),
    "weight_seconds": _counter(
        "weight_seconds", "job stage", "rollout trainer", "Seconds by stage."
    ),
    "weight_events": _counter(
        "weight_events", "job event", "rollout trainer", "Transfer events; damaged: wrong digest."
    ),
    "weight_version": _gauge(
        "weight_version", "job state", "rollout", "Newest complete version (held), and active one."
    ),
    "weight_canary_ratio": _gauge(
        "weight_canary_ratio", "job", "rollout", "Difference of the canary, in units of its noise."
    ),
    "worker_mismatch": _gauge(
        "worker_mismatch_kl", "job worker", "experience", "KL per token from worker to trainer."
    ),
    # controller: replicas, the signals that scaling follows, and cost
    "wanted_replicas": _gauge(
        "wanted_replicas", "workload job pool", "controller", "Replicas wanted to meet demand."
    ),
    "ready_replicas": _gauge(
        "ready_replicas",
        "workload job pool",
        "controller",
        "Replicas that are ready; rollout workers count once they have weights.",
    ),
    "trainer_wait_share": _gauge(
        "trainer_wait_share",
        "job",
        "controller",
        "Share of time that the trainer waits for batches.",
    ),
    "needed_tokens": _gauge(
        "needed_tokens_per_second",
        "job",
        "controller",
        "Tokens per second needed for the trainer not to wait.",
    ),
    "worker_tokens": _gauge(
        "worker_tokens_per_second", "job pool", "controller", "Tokens per second of a busy worker."
    ),
    "wanted_episodes": _gauge(
        "wanted_episodes", "job", "controller", "Episodes running, waiting or admissible."
    ),
    "pending_scores": _gauge(
        "pending_scores", "workload", "controller", "Responses waiting to be scored."
    ),
    "no_progress": _gauge(
        "no_progress_seconds", "job", "controller", "Seconds since a job got on; 0: it does."
    ),
    "restarts": _counter("restarts", "service", "controller", "Processes restarted."),
    "accelerator_seconds": _counter(
        "accelerator_seconds",
        "job pool",
        "controller",
        "Seconds of rollout workers (by pool) and trainer ranks (pool trainer).",
    ),
    "cost": _counter(
        "cost",
        "job pool",
        "controller",
        "Their cost, in the unit of `pools.<name>.cost`; a trainer rank costs `trainer_cost`.",
    ),
}
