"""Sampling: throughput, utilisation and weights."""

from frame import Panels, Query, Size, board, graph, heading, number
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from boards.choices import JOB, JOBS, POOL

POOLS = '{workload="rollout", job=~"$job", pool=~"$pool"}'
OLD = ((None, "green"), (60, "orange"), (300, "red"))


def rollout() -> Dashboard:
    """Tokens, requests, caches, replicas and the age of weights."""
    return board(
        "rollout",
        "Rollout",
        "Throughput, requests and caches of rollout workers, and the age of their weights.",
        [*_tokens(), *_engine(), *_weights(), *_replicas()],
        variables=[JOB, POOL],
    )


def _tokens() -> Panels:
    sampled = f"rate(paceline_generated_tokens_total{JOBS}[$__rate_interval])"
    prompts = f"rate(paceline_prompt_tokens_total{JOBS}[$__rate_interval])"
    cached = f"rate(paceline_cached_tokens_total{JOBS}[$__rate_interval])"
    return [
        heading("Tokens"),
        graph(
            "Sampled tokens",
            "Tokens per second by job; the line named needed is what its trainer consumes.",
            Query(f"sum by (job) ({sampled})", "{{job}}"),
            Query(f"sum by (job) (paceline_needed_tokens_per_second{JOBS})", "{{job}} needed"),
        ),
        graph(
            "Sampled tokens by worker",
            "A worker far below the others is slow or gets no requests.",
            Query(f"sum by (instance) ({sampled})", "{{instance}}"),
            size=Size(6, 8),
        ),
        graph(
            "Sampled per trained token",
            "The excess over one was dropped, used for evaluation, or is in flight.",
            Query(
                f"sum by (job) ({sampled}) / "
                f"sum by (job) (rate(paceline_trained_tokens_total{JOBS}[$__rate_interval]))",
                "{{job}}",
            ),
            size=Size(6, 8),
        ),
        graph(
            "Prompt tokens",
            "Tokens per second that were prefilled, and those found in the prefix cache.",
            Query(f"sum by (job) ({prompts})", "{{job}} prefilled"),
            Query(f"sum by (job) ({cached})", "{{job}} cached"),
        ),
        number(
            "Prefix cache",
            "Share of prompt tokens found in the prefix cache.",
            Query(f"sum({cached}) / (sum({prompts}) + sum({cached}))"),
            unit=units.PercentUnit,
            size=Size(4, 8),
        ),
        graph(
            "Tokens resumed and lost",
            "resumed: carried over after a worker was lost or drained; "
            "lost: in episodes that had to start over.",
            Query(
                "sum by (failed_service) (rate(paceline_resumed_tokens_total[$__rate_interval]))",
                "resumed ({{failed_service}})",
            ),
            Query("sum(rate(paceline_lost_tokens_total[$__rate_interval]))", "lost"),
            size=Size(8, 8),
        ),
    ]


def _engine() -> Panels:
    return [
        heading("Engines"),
        graph(
            "Requests",
            "Requests running and waiting in the engines.",
            Query(f"sum by (job, state) (paceline_requests{JOBS})", "{{job}} {{state}}"),
            size=Size(8, 8),
        ),
        graph(
            "Queued tokens",
            "Tokens of turns queued in environment workers because all rollout workers are full.",
            Query("sum(paceline_queued_tokens)", "queued tokens"),
            size=Size(8, 8),
        ),
        graph(
            "KV cache",
            "Share in use by worker; engines that do not report it are not shown.",
            Query(f"max by (instance) (paceline_kv_cache_ratio{JOBS})", "{{instance}}"),
            unit=units.PercentUnit,
            size=Size(8, 8),
            max_value=1,
        ),
    ]


def _weights() -> Panels:
    return [
        heading("Weights and silence"),
        graph(
            "Versions behind",
            "By worker. Above the dashed line of its job a worker gets no new requests.",
            Query(f"max by (job, instance) (paceline_version_lag{JOBS})", "{{instance}}"),
            Query(f"max by (job) (paceline_version_lag_bound{JOBS})", "bound of {{job}}"),
            size=Size(8, 8),
        ),
        graph(
            "Age of the weights",
            "Time since activation, by worker.",
            Query(f"max by (instance) (paceline_weights_age_seconds{JOBS})", "{{instance}}"),
            unit=units.Seconds,
            size=Size(8, 8),
        ),
        graph(
            "Silence",
            "Time since a worker sampled its last token; long and with requests, the worker hangs.",
            Query(f"max by (instance) (paceline_token_age_seconds{JOBS})", "{{instance}}"),
            unit=units.Seconds,
            size=Size(8, 8),
            steps=OLD,
        ),
    ]


def _replicas() -> Panels:
    return [
        heading("Replicas"),
        graph(
            "Replicas",
            "Workers wanted by scaling, and workers ready with weights.",
            Query(
                f"sum by (job, pool) (paceline_wanted_replicas{POOLS})", "{{job}} {{pool}} wanted"
            ),
            Query(f"sum by (job, pool) (paceline_ready_replicas{POOLS})", "{{job}} {{pool}} ready"),
        ),
        graph(
            "Speed of a busy worker",
            "Tokens per second, as measured by scaling.",
            Query(
                'max by (job, pool) (paceline_worker_tokens_per_second{job=~"$job", '
                'pool=~"$pool"})',
                "{{job}} {{pool}}",
            ),
        ),
    ]
