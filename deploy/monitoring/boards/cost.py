"""What training costs: machines' time, and its price for each token trained on."""

from frame import Panels, Query, Size, bars, board, graph, heading, number
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from boards.choices import JOB, JOBS, POOL

POOLS = '{job=~"$job", pool=~"$pool"}'


def cost() -> Dashboard:
    """Cost by job and pool, and by what came of it."""
    return board(
        "cost",
        "Cost",
        "Cost of rollout workers and trainers, in the unit of the pools' `cost`, and the cost of "
        "a token that was trained on.",
        [*_tokens(), *_spent()],
        variables=[JOB, POOL],
    )


def _tokens() -> Panels:
    spent = f"paceline_cost_total{POOLS}"
    trained = f"paceline_trained_tokens_total{JOBS}"
    return [
        heading("Cost of a token"),
        number(
            "A million trained tokens",
            "Over the time shown, all jobs together.",
            Query(f"1e6 * sum(increase({spent}[$__range])) / sum(increase({trained}[$__range]))"),
            size=Size(6, 8),
        ),
        graph(
            "A million trained tokens, by job",
            "Rises when tokens are dropped, when workers idle, and when the trainer waits.",
            Query(
                f"1e6 * sum by (job) (rate({spent}[$__rate_interval])) / "
                f"sum by (job) (rate({trained}[$__rate_interval]))",
                "{{job}}",
            ),
            size=Size(10, 8),
        ),
        graph(
            "An optimiser step, by job",
            "Cost per second by steps per second.",
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
        heading("Spent"),
        number(
            "Over the time shown",
            "All jobs and pools.",
            Query(f"sum(increase({spent}[$__range]))"),
            size=Size(6, 8),
        ),
        bars(
            "By job and pool",
            "Over the time shown; the pool trainer is the ranks of the trainer.",
            Query(f"sum by (job, pool) (increase({spent}[$__range]))", "{{job}} {{pool}}"),
            size=Size(10, 8),
        ),
        graph(
            "Per hour",
            "At the present rate.",
            Query(
                f"3600 * sum by (job, pool) (rate({spent}[$__rate_interval]))", "{{job}} {{pool}}"
            ),
            size=Size(8, 8),
        ),
        graph(
            "Workers paid for",
            "Rollout workers by pool, and ranks of the trainer.",
            Query(f"sum by (job, pool) (rate({used}[$__rate_interval]))", "{{job}} {{pool}}"),
            stacked=True,
        ),
        graph(
            "Idle workers",
            "Share of time in which rollout workers have no request and ranks no batch.",
            Query('1 - paceline:busy:ratio{service=~"rollout|trainer"}', "{{service}}"),
            unit=units.PercentUnit,
            most=1,
        ),
    ]
