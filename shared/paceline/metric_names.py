"""Every Prometheus metric: name, kind, labels, who exports it, what it means.

Labels are `job` (live jobs only) and those of `VALUES`, which are bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.types import DropReason, EpisodeState, JobState, WorkerKind

Kind = Literal["counter", "gauge", "histogram"]
SERVICES = tuple(str(kind) for kind in WorkerKind)
WORKERS = ("environment", "reward", "rollout", "trainer")
ALL = ("all",)
OTHER = "other"  # what a label says that has no room for a further value


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


# What the labels may say: these values, or at most so many different ones in a process and job.
VALUES: dict[str, tuple[str, ...] | int] = {
    "service": SERVICES,
    "on": (*SERVICES, "store", "weights"),
    "kind": ("full", "delta"),
    "state": (
        *(str(state) for state in EpisodeState),
        *(str(state) for state in JobState),
        *("open", "headroom", "running", "waiting", "held", "active"),
    ),
    "reason": (
        *(str(reason) for reason in DropReason),
        "hung",
        "crashed",
        "refused",
        "missing",
        "role",
        "tenant",
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
    "statistic": 12,  # of an objective
    "part": 8,  # of a reward
    "pool": 16,  # of an installation
    "method": 64,  # of a service
    "version": 1,
    "tenant": 256,  # of an installation
    "of": 16,  # what a quota limits
    "tracker": 16,  # kinds of them that are installed
    "caller": 16,  # kinds of service, and what is none
}

NAMES: dict[str, Spec] = {
    # every service: how busy am I, whom do I wait for
    "build": _gauge("build_info", "service version", "all", "Always 1; what runs."),
    "busy": _counter(
        "busy_seconds",
        "service",
        "all",
        "Seconds of capacity in use: slots with an open episode (environment), the engine has "
        "requests (rollout), a call is under way (reward), steps, checkpoints and publications "
        "(trainer), processor time of the event loop (the others).",
    ),
    "capacity": _gauge(
        "capacity",
        "service",
        "all",
        "How much can be in use at once: slots of an environment, else 1.",
    ),
    "wait": _counter(
        "wait_seconds",
        "service on",
        "all",
        "Seconds that what this process has open (episodes, ranks, calls) waited for another "
        "service, those still open included. Time in which this process did not run is not in it.",
    ),
    "stalled": _counter(
        "stalled_seconds",
        "service",
        "all",
        "Seconds in which the event loop should have turned and did not: frozen, starved of "
        "processor time, or held up by its own work.",
    ),
    "handling": _counter(
        "handling_seconds",
        "service",
        "gateway experience",
        "Seconds in which at least one call of a caller was being handled; streams do not count.",
    ),
    "rpcs": _counter("rpcs", "method outcome", "all", "Calls answered; those of streams not."),
    "rpc_seconds": _counter("rpc_seconds", "method", "all", "Seconds in these calls."),
    "spans": _counter(
        "spans", "outcome", "all", "Spans of traces: sent, not taken, or dropped from a full queue."
    ),
    "refused_calls": _counter(
        "refused_calls", "caller", "all", "Calls refused by the caller's certificate, by its kind."
    ),
    "access_refusals": _counter(
        "access_refusals",
        "reason",
        "gateway",
        "Calls of users refused, by reason: missing, invalid, role, tenant.",
    ),
    # tracking
    "tracking_rows": _counter(
        "tracking_rows", "tracker", "tracking", "Rows of histories that experiment trackers took."
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
        "Seconds since the tracker that is furthest behind had everything.",
    ),
    # tenants
    "tenant_use": _gauge(
        "tenant_use",
        "tenant of",
        "experience",
        "What a tenant has: submitted jobs, jobs, rollout workers, episodes, bytes in the store; "
        "of sizes the largest of the last hour or two.",
    ),
    "tenant_quota": _gauge(
        "tenant_quota",
        "tenant of",
        "experience",
        "What a tenant may have at most; not there where nothing limits it.",
    ),
    # what live jobs wait for
    "jobs": _gauge("jobs", "state", "experience", "Live jobs by state."),
    "job_seconds": _counter(
        "job_seconds",
        "job on",
        "experience",
        "What a live job waited for: controller (no trainer was started yet), trainer (it starts, "
        "works or is away), environment (its batch is not there), store (nor does it answer).",
    ),
    # ledger
    "episodes": _gauge("episodes", "job state", "experience", "Training episodes by state."),
    "admitted": _counter("admitted_episodes", "job", "experience", "Episodes made."),
    "trained_episodes": _counter("trained_episodes", "job", "experience", "Episodes trained on."),
    "dropped": _counter("dropped_episodes", "job reason", "experience", "Episodes dropped."),
    "attempts": _counter("attempts", "job", "experience", "Leases granted: attempts at episodes."),
    "expired": _counter("leases_expired", "job", "experience", "Leases that ran out."),
    "groups": _gauge(
        "groups",
        "job state",
        "experience",
        "Groups that are open, ready for a batch, or would be admitted (headroom).",
    ),
    "finished_groups": _counter(
        "finished_groups", "job variance", "experience", "Groups scored, by variance of rewards."
    ),
    "ledger_broken": _gauge(
        "ledger_broken", "job", "experience", "1 if the ledger's identity does not hold, else 0."
    ),
    "ledger_problems": _gauge(
        "ledger_problems",
        "job",
        "experience",
        "What the last audit found wrong; audits run every minute.",
    ),
    "store_losses": _counter(
        "store_losses", "job", "experience", "How often the store had lost what was written last."
    ),
    "payload_bytes": _gauge(
        "payload_bytes", "job", "experience", "Trajectories held in the store."
    ),
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
        "Where submitted episodes spent their time, as their environment worker measured it.",
    ),
    "submitted": _counter(
        "submitted_episodes", "job purpose", "experience", "Trajectories taken in."
    ),
    "sample_age": _gauge(
        "sample_age_seconds", "job", "experience", "Since the last trajectory came in."
    ),
    "damaged_checkpoints": _gauge(
        "damaged_checkpoints",
        "job",
        "trainer",
        "What was wrong with checkpoints that this start of the trainer has passed over.",
    ),
    "checkpoint_age": _gauge(
        "checkpoint_age_seconds",
        "job",
        "experience",
        "Since the last durable checkpoint, or since the job was opened here.",
    ),
    "trainer_waiting": _gauge(
        "trainer_waiting_seconds",
        "job",
        "experience",
        "How long the trainer has waited for its batch.",
    ),
    # the last batch, in terms of RL
    "reward": _gauge("reward_mean", "job purpose", "experience", "Of the last batch, or eval."),
    "reward_std": _gauge("reward_std", "job", "experience", "Of the last batch."),
    "reward_part": _gauge(
        "reward_part_mean", "job part", "experience", "By part of the reward, last batch."
    ),
    "group_std": _gauge(
        "group_reward_std", "job", "experience", "Mean over groups of the deviation inside one."
    ),
    "zero_variance": _gauge(
        "zero_variance_ratio",
        "job",
        "experience",
        "Share of groups in the last batch whose rewards are all equal.",
    ),
    "response": _gauge("response_tokens_mean", "job", "experience", "Policy tokens of an episode."),
    "response_max": _gauge("response_tokens_max", "job", "experience", "The longest of the batch."),
    "truncated": _gauge("truncated_ratio", "job", "experience", "Share cut off, last batch."),
    "staleness_mean": _gauge("staleness_steps_mean", "job", "experience", "Of the last batch."),
    "batch_versions": _gauge(
        "batch_versions", "job", "experience", "Policy versions in the last batch."
    ),
    "staleness": Spec(
        "histogram",
        "paceline_staleness_steps",
        ("job",),
        ("experience",),
        "Trained samples by age in optimiser steps.",
        buckets=(0, 1, 2, 4, 8, 16),
    ),
    # the last optimiser step, from what the trainer commits
    "loss": _gauge("loss", "job", "experience", "Of the last optimiser step."),
    "grad_norm": _gauge("grad_norm", "job", "experience", "Before clipping, last step."),
    "lr": _gauge("learning_rate", "job", "experience", "Of the last step."),
    "objective": _gauge(
        "objective",
        "job statistic",
        "experience",
        "What the objective tells: entropy_estimate, clip_fraction, kl, mismatch_kl, ...",
    ),
    # trainer
    "phase_seconds": _counter(
        "trainer_seconds", "job phase", "trainer", "Where the time of a rank goes."
    ),
    "rank_tokens": _counter(
        "trainer_tokens", "job", "trainer", "Policy tokens trained, all ranks (told by rank 0)."
    ),
    "fed_tokens": _counter(
        "fed_tokens", "job", "trainer", "Tokens through the model, prompts and idle ones too."
    ),
    "mfu": _gauge(
        "mfu_ratio",
        "job",
        "trainer",
        "Model FLOPs of the last step by what the devices could do; absent if unknown.",
    ),
    "memory": _gauge(
        "accelerator_memory_bytes", "job memory", "trainer", "Of this rank; absent on CPU."
    ),
    # environment
    "open": _gauge("open_episodes", "purpose", "environment", "Leased and running here."),
    "finished": _counter("finished_episodes", "", "environment", "Scored and submitted."),
    "given_back": _counter("given_back_episodes", "cause", "environment", "Leases given back."),
    "calls": _counter("environment_calls", "call", "environment", "Calls of environments."),
    "call_seconds": _counter("environment_call_seconds", "call", "environment", "Seconds in them."),
    "queued_tokens": _gauge(
        "queued_tokens",
        "",
        "environment",
        "Tokens of turns that wait for room on a rollout worker.",
    ),
    "received_tokens": _counter(
        "received_tokens", "", "environment", "Sampled tokens that arrived from rollout workers."
    ),
    "resumed_tokens": _counter(
        "resumed_tokens",
        "on",
        "environment",
        "Sampled tokens gone on from elsewhere, by whose failure.",
    ),
    "lost_tokens": _counter(
        "lost_tokens", "", "environment", "Sampled tokens of episodes that had to begin again."
    ),
    # reward
    "scored": _counter("scores", "status", "reward", "Answers scored."),
    "part_seconds": _counter("score_seconds", "part", "reward", "Seconds in the parts of rewards."),
    "part_scores": _counter("part_scores", "part", "reward", "Answers scored by them."),
    "scoring": _gauge("scoring", "", "reward", "Answers being scored or waiting for it."),
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
        "Share of the KV cache in use; absent where the engine does not tell.",
    ),
    "requests": _gauge("requests", "job state", "rollout", "Running and waiting in the engine."),
    "version_lag": _gauge(
        "version_lag", "job", "rollout", "Versions behind the newest one it was sent for."
    ),
    "lag_bound": _gauge(
        "version_lag_bound",
        "job",
        "experience",
        "Versions that a rollout worker may be behind: max_staleness by publish_every.",
    ),
    "weights_age": _gauge(
        "weights_age_seconds", "job", "rollout", "Since its weights became active."
    ),
    "token_age": _gauge("token_age_seconds", "job", "rollout", "Since it sampled its last token."),
    # weights
    "weight_bytes": _counter(
        "weight_bytes", "job direction kind", "rollout trainer", "On the network."
    ),
    "weight_seconds": _counter("weight_seconds", "job stage", "rollout trainer", "By stage."),
    "weight_events": _counter(
        "weight_events",
        "job event",
        "rollout trainer",
        "Troubles and turns of transfers; damaged: a digest did not match.",
    ),
    "weight_version": _gauge(
        "weight_version", "job state", "rollout", "Newest version held whole, and the one active."
    ),
    # controller: how many replicas, what they follow, what they cost
    "wanted_replicas": _gauge(
        "wanted_replicas", "workload job pool", "controller", "Replicas that demand asks for."
    ),
    "ready_replicas": _gauge(
        "ready_replicas",
        "workload job pool",
        "controller",
        "Replicas that answer; rollout workers, with weights.",
    ),
    "trainer_wait_share": _gauge(
        "trainer_wait_share",
        "job",
        "controller",
        "Share of its time that the trainer waits for batches.",
    ),
    "needed_tokens": _gauge(
        "needed_tokens_per_second",
        "job",
        "controller",
        "Tokens per second so that the trainer does not wait.",
    ),
    "worker_tokens": _gauge(
        "worker_tokens_per_second",
        "job pool",
        "controller",
        "Tokens per second of a busy rollout worker.",
    ),
    "wanted_episodes": _gauge(
        "wanted_episodes", "job", "controller", "Episodes that run, wait or would be admitted."
    ),
    "pending_scores": _gauge(
        "pending_scores", "workload", "controller", "Answers that wait for their score."
    ),
    "restarts": _counter(
        "restarts", "service", "controller", "Processes started again after they ended."
    ),
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
        "Cost of these, in the unit of `pools.<name>.cost`; a trainer rank costs `trainer_cost`.",
    ),
}
