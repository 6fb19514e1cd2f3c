"""Training: speed, last step and last batch."""

from frame import Panels, Query, Size, board, graph, heading, number
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from boards.choices import JOB, JOBS


def trainer() -> Dashboard:
    """Speed of the trainer, metrics of its last step, and its last batch."""
    return board(
        "trainer",
        "Trainer",
        "Speed and phases of trainers, metrics of the last step, and staleness of its batch.",
        [*_speed(), *_step(), *_batch()],
        variables=[JOB],
    )


def _speed() -> Panels:
    seconds = f"rate(paceline_trainer_seconds_total{JOBS}[$__rate_interval])"
    return [
        heading("Speed"),
        graph(
            "Step",
            "Optimiser steps; rewinds after a crash.",
            Query(f"paceline_step{JOBS}", "{{job}}"),
            size=Size(6, 8),
        ),
        graph(
            "Phases",
            "Share of the time of all ranks; waiting means for a batch.",
            Query(
                f"sum by (job, phase) ({seconds}) / on (job) group_left sum by (job) ({seconds})",
                "{{job}} {{phase}}",
            ),
            unit=units.PercentUnit,
            stacked=True,
            max_value=1,
            size=Size(10, 8),
        ),
        graph(
            "Current wait",
            "How long the trainer has been waiting for its batch.",
            Query(f"max by (job) (paceline_trainer_waiting_seconds{JOBS})", "{{job}}"),
            unit=units.Seconds,
            size=Size(8, 8),
        ),
        graph(
            "Tokens",
            "Policy tokens trained per second, and all tokens processed by the model.",
            Query(
                f"sum by (job) (rate(paceline_trainer_tokens_total{JOBS}[$__rate_interval]))",
                "{{job}} policy",
            ),
            Query(
                f"sum by (job) (rate(paceline_fed_tokens_total{JOBS}[$__rate_interval]))",
                "{{job}} all",
            ),
            size=Size(8, 8),
        ),
        graph(
            "Model FLOPs utilisation",
            "Of the last step; only for devices with a known peak (GPUs).",
            Query(f"avg by (job) (paceline_mfu_ratio{JOBS})", "{{job}}"),
            unit=units.PercentUnit,
            size=Size(4, 8),
        ),
        graph(
            "Accelerator memory",
            "Maximum over the ranks; GPUs only.",
            Query(
                f"max by (job, memory) (paceline_accelerator_memory_bytes{JOBS})",
                "{{job}} {{memory}}",
            ),
            unit=units.BytesIEC,
            size=Size(6, 8),
        ),
        number(
            "Last checkpoint",
            "Age of the last durable checkpoint: the work that a crash would lose.",
            Query(f"max(paceline_checkpoint_age_seconds{JOBS})"),
            unit=units.Seconds,
            size=Size(6, 8),
            steps=((None, "green"), (3600, "orange"), (7200, "red")),
        ),
    ]


def _step() -> Panels:
    return [
        heading("Last step"),
        graph(
            "Loss",
            "Of the last optimiser step.",
            Query(f"paceline_loss{JOBS}", "{{job}}"),
            size=Size(6, 8),
        ),
        graph(
            "Gradient norm",
            "Before clipping.",
            Query(f"paceline_grad_norm{JOBS}", "{{job}}"),
            size=Size(6, 8),
        ),
        graph(
            "Learning rate",
            "Of the last step.",
            Query(f"paceline_learning_rate{JOBS}", "{{job}}"),
            unit=units.ScientificNotation,
            size=Size(6, 8),
        ),
        graph(
            "Objective",
            "Reported by the objective: clipped share, divergences, entropy, mismatch of engine "
            "and trainer.",
            Query(f"paceline_objective{JOBS}", "{{job}} {{statistic}}"),
            size=Size(6, 8),
        ),
    ]


def _batch() -> Panels:
    buckets = f"sum by (le) (increase(paceline_staleness_steps_bucket{JOBS}[$__rate_interval]))"
    return [
        heading("Last batch"),
        graph(
            "Staleness",
            "Steps between the weights that sampled and those being trained: mean of the batch, "
            "and 95th percentile.",
            Query(f"paceline_staleness_steps_mean{JOBS}", "{{job}} mean"),
            Query(f"histogram_quantile(0.95, {buckets})", "95 %"),
            size=Size(8, 8),
        ),
        graph(
            "Versions in a batch",
            "Number of policy versions that sampled it.",
            Query(f"paceline_batch_versions{JOBS}", "{{job}}"),
            size=Size(8, 8),
        ),
        graph(
            "Tokens per episode",
            "Policy tokens, last batch.",
            Query(f"paceline_response_tokens_mean{JOBS}", "{{job}} mean"),
            Query(f"paceline_response_tokens_max{JOBS}", "{{job}} longest"),
            size=Size(8, 8),
        ),
    ]
