"""Cost of training: machine time, in total and per trained token."""

from frame import Panels, Query, Size, bars, board, graph, heading, number
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from boards.choices import JOB, JOBS, POOL

POOLS = '{job=~"$job", pool=~"$pool"}'


def cost() -> Dashboard:
    """Cost by job and pool, per token and per step."""
    return board(
        "cost",
        "Cost",
        "Cost of rollout workers and trainers, in the unit of the pools' `cost`, in total and "
        "per trained token.",
        [*_tokens(), *_spent()],
        variables=[JOB, POOL],
    )


def _tokens() -> Panels:
    spent = f"paceline_cost_total{POOLS}"
    trained = f"paceline_trained_tokens_total{JOBS}"
    return [
        heading("Unit cost"),
        number(
            "Cost per million trained tokens",
            "Over the time range, all jobs.",
            Query(f"1e6 * sum(increase({spent}[$__range])) / sum(increase({trained}[$__range]))"),
            size=Size(6, 8),
        ),
        graph(
            "Cost per million trained tokens, by job",
            "Rises when tokens are dropped, when workers idle, and when the trainer waits.",
            Query(
                f"1e6 * sum by (job) (rate({spent}[$__rate_interval])) / "
                f"sum by (job) (rate({trained}[$__rate_interval]))",
                "{{job}}",
            ),
            size=Size(10, 8),
        ),
        graph(
            "Cost per optimiser step, by job",
            "Cost per second divided by steps per second.",
            Query(
                f"sum by (job) (rate({spent}[$__rate_interval])) / "
                f"(sum by (job) (rate(paceline_step{JOBS}[$__rate_interval])) > 0)",
                "{{job}}",
            ),
            size=Size(8, 8),
        ),
    ]


def _spent() -> Panels:
    spent = f"paceline_cost_total{POOLS}"
    used = f"paceline_accelerator_seconds_total{POOLS}"
    return [
        heading("Total cost"),
        number(
            "Over the time range",
            "All jobs and pools.",
            Query(f"sum(increase({spent}[$__range]))"),
            size=Size(6, 8),
        ),
        bars(
            "By job and pool",
            "Over the time range; the pool named trainer stands for trainer ranks.",
            Query(f"sum by (job, pool) (increase({spent}[$__range]))", "{{job}} {{pool}}"),
            size=Size(10, 8),
        ),
        graph(
            "Per hour",
            "At the current rate.",
            Query(
                f"3600 * sum by (job, pool) (rate({spent}[$__rate_interval]))", "{{job}} {{pool}}"
            ),
            size=Size(8, 8),
        ),
        graph(
            "Paid workers",
            "Rollout workers by pool, and trainer ranks.",
            Query(f"sum by (job, pool) (rate({used}[$__rate_interval]))", "{{job}} {{pool}}"),
            stacked=True,
        ),
        graph(
            "Idle workers",
            "Share of time in which rollout workers have no requests and trainer ranks no batch.",
            Query('1 - paceline:busy:ratio{service=~"rollout|trainer"}', "{{service}}"),
            unit=units.PercentUnit,
            max_value=1,
        ),
    ]
