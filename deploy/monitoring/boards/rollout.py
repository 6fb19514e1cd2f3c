"""Sampling: how fast, how full, with which weights."""

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
        "Tokens per second, requests and caches of rollout workers, and how old their weights are.",
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
            "Tokens per second by job; the dashed line of scaling is what its trainer needs.",
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
            "Tokens for each that is trained",
            "Sampled by trained tokens; above one is what was dropped, measured or is under way.",
            Query(
                f"sum by (job) ({sampled}) / "
                f"sum by (job) (rate(paceline_trained_tokens_total{JOBS}[$__rate_interval]))",
                "{{job}}",
            ),
            size=Size(6, 8),
        ),
        graph(
            "Prompt tokens",
            "Tokens per second that were prefilled, and that the prefix cache had.",
            Query(f"sum by (job) ({prompts})", "{{job}} prefilled"),
            Query(f"sum by (job) ({cached})", "{{job}} cached"),
        ),
        number(
            "Prefix cache",
            "Share of prompt tokens found in the cache of prefixes.",
            Query(f"sum({cached}) / (sum({prompts}) + sum({cached}))"),
            unit=units.PercentUnit,
            size=Size(4, 8),
        ),
        graph(
            "Tokens saved and lost",
            "resumed: gone on from elsewhere after a worker was lost or drained; "
            "lost: of episodes that had to begin again.",
            Query(
                "sum by (on) (rate(paceline_resumed_tokens_total[$__rate_interval]))",
                "resumed ({{on}})",
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
            "Running and waiting in the engines.",
            Query(f"sum by (job, state) (paceline_requests{JOBS})", "{{job}} {{state}}"),
            size=Size(8, 8),
        ),
        graph(
            "Tokens that wait for room",
            "Of turns that wait in environment workers because all rollout workers are full.",
            Query("sum(paceline_queued_tokens)", "queued tokens"),
            size=Size(8, 8),
        ),
        graph(
            "KV cache",
            "Share in use by worker; engines that do not tell are not shown.",
            Query(f"max by (instance) (paceline_kv_cache_ratio{JOBS})", "{{instance}}"),
            unit=units.PercentUnit,
            size=Size(8, 8),
            most=1,
        ),
    ]


def _weights() -> Panels:
    return [
        heading("Weights and silence"),
        graph(
            "Versions behind",
            "By worker. Above the dashed line of its job a worker gets no new work.",
            Query(f"max by (job, instance) (paceline_version_lag{JOBS})", "{{instance}}"),
            Query(f"max by (job) (paceline_version_lag_bound{JOBS})", "bound of {{job}}"),
            size=Size(8, 8),
        ),
        graph(
            "Age of the weights",
            "Since they became active, by worker.",
            Query(f"max by (instance) (paceline_weights_age_seconds{JOBS})", "{{instance}}"),
            unit=units.Seconds,
            size=Size(8, 8),
        ),
        graph(
            "Silence",
            "Since a worker sampled its last token; long and with requests means that it hangs.",
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
            "Wanted by demand, and ready with weights.",
            Query(
                f"sum by (job, pool) (paceline_wanted_replicas{POOLS})", "{{job}} {{pool}} wanted"
            ),
            Query(f"sum by (job, pool) (paceline_ready_replicas{POOLS})", "{{job}} {{pool}} ready"),
        ),
        graph(
            "Speed of a busy worker",
            "Tokens per second as scaling measured it.",
            Query(
                'max by (job, pool) (paceline_worker_tokens_per_second{job=~"$job", '
                'pool=~"$pool"})',
                "{{job}} {{pool}}",
            ),
        ),
    ]
