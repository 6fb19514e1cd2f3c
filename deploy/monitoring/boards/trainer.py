"""Training: speed, the last step, the last batch."""

from frame import Panels, Query, Size, board, graph, heading, number
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from boards.choices import JOB, JOBS


def trainer() -> Dashboard:
    """Speed of the trainer, numbers of its last step, and what it was fed."""
    return board(
        "trainer",
        "Trainer",
        "Speed and phases of trainers, numbers of the last step, and the age of its batch.",
        [*_speed(), *_step(), *_batch()],
        variables=[JOB],
    )


def _speed() -> Panels:
    seconds = f"rate(paceline_trainer_seconds_total{JOBS}[$__rate_interval])"
    return [
        heading("Speed"),
        graph(
            "Step",
            "Optimiser steps; goes back after a crash.",
            Query(f"paceline_step{JOBS}", "{{job}}"),
            size=Size(6, 8),
        ),
        graph(
            "Phases",
            "Share of the time of all ranks. waiting: for a batch.",
            Query(
                f"sum by (job, phase) ({seconds}) / on (job) group_left sum by (job) ({seconds})",
                "{{job}} {{phase}}",
            ),
            unit=units.PercentUnit,
            stacked=True,
            most=1,
            size=Size(10, 8),
        ),
        graph(
            "Waits at present",
            "How long the trainer has waited for its batch.",
            Query(f"max by (job) (paceline_trainer_waiting_seconds{JOBS})", "{{job}}"),
            unit=units.Seconds,
            size=Size(8, 8),
        ),
        graph(
            "Tokens",
            "Policy tokens trained per second, and all tokens that went through the model.",
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
            "Of the last step; only where the peak of the device is known (GPUs).",
            Query(f"avg by (job) (paceline_mfu_ratio{JOBS})", "{{job}}"),
            unit=units.PercentUnit,
            size=Size(4, 8),
        ),
        graph(
            "Memory of accelerators",
            "Most over the ranks; GPUs only.",
            Query(
                f"max by (job, memory) (paceline_accelerator_memory_bytes{JOBS})",
                "{{job}} {{memory}}",
            ),
            unit=units.BytesIEC,
            size=Size(6, 8),
        ),
        number(
            "Last checkpoint",
            "Age of the last durable checkpoint: what a crash would cost.",
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
            "What the objective tells: clipped share, divergences, entropy, disagreement of "
            "engine and trainer.",
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
            "Steps between the weights that sampled and those that train: mean of the batch, and "
            "the 95th of a hundred samples.",
            Query(f"paceline_staleness_steps_mean{JOBS}", "{{job}} mean"),
            Query(f"histogram_quantile(0.95, {buckets})", "95 %"),
            size=Size(8, 8),
        ),
        graph(
            "Versions in a batch",
            "Policy versions that sampled it.",
            Query(f"paceline_batch_versions{JOBS}", "{{job}}"),
            size=Size(8, 8),
        ),
        graph(
            "Tokens of an episode",
            "Policy tokens, last batch.",
            Query(f"paceline_response_tokens_mean{JOBS}", "{{job}} mean"),
            Query(f"paceline_response_tokens_max{JOBS}", "{{job}} longest"),
            size=Size(8, 8),
        ),
    ]
