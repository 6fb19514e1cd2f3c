"""Utilisation of every service, waits between them, and the bottleneck."""

from frame import SHARE_BUSY, Panels, Query, Size, bars, board, graph, heading, name
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from boards.choices import JOB, JOBS, SERVICE, rate

OF_SERVICE = '{service=~"$service"}'


def utilisation() -> Dashboard:
    """Busy shares, waits and the bottleneck."""
    return board(
        "utilisation",
        "Utilisation",
        "Utilisation of every service, waits between services, and the bottleneck.",
        [*_bottleneck(), *_busy(), *_waits(), *_jobs()],
        variables=[JOB, SERVICE],
    )


def _bottleneck() -> Panels:
    return [
        heading("Bottleneck"),
        name(
            "Bottleneck",
            "The service that most of the training time is spent waiting for: waits are followed "
            "from the trainer to the end of the chain. Adding capacity here speeds up training.",
            Query("paceline:bottleneck", "{{service}}"),
            size=Size(6, 8),
        ),
        bars(
            "Share of training time attributed to each service",
            "Adds up to about one while jobs are live. For the gateway: share of time in which "
            "users wait for it.",
            Query("paceline:blame:ratio", "{{service}}"),
            unit=units.PercentUnit,
            size=Size(8, 8),
            max_value=1,
        ),
        graph(
            "The same over time",
            "When the bottleneck changes, add capacity to the new one.",
            Query("paceline:blame:ratio", "{{service}}"),
            unit=units.PercentUnit,
            size=Size(10, 8),
        ),
    ]


def _busy() -> Panels:
    return [
        heading("Busy"),
        graph(
            "Busy share",
            "Share of capacity in use: slots of environments, engines with requests, reward "
            "workers with a call, trainers at a step; CPU time for the others.",
            Query(f"paceline:busy:ratio{OF_SERVICE}", "{{service}}"),
            unit=units.PercentUnit,
            max_value=1,
        ),
        bars(
            "Busy now",
            "Blue: spare capacity. Green: well used. Orange: saturated, which is fine for the "
            "service that is meant to be the bottleneck.",
            Query(f"paceline:busy:ratio{OF_SERVICE}", "{{service}}"),
            unit=units.PercentUnit,
            steps=SHARE_BUSY,
            size=Size(6, 8),
            max_value=1,
        ),
        graph(
            "Stalled share",
            "Share of time in which runnable processes did not run: frozen, short of CPU time, or "
            "blocked by their own work. Other metrics of a stalled service are unreliable.",
            Query(f"paceline:stalled:ratio{OF_SERVICE}", "{{service}}"),
            unit=units.PercentUnit,
            size=Size(6, 8),
            steps=((None, "green"), (0.3, "red")),
        ),
    ]


def _waits() -> Panels:
    return [
        heading("Waits"),
        graph(
            "Who waits for whom",
            "Mean number of episodes, ranks and calls of a service waiting for another service.",
            Query(f"paceline:waiting:units{OF_SERVICE}", "{{service}} waits for {{waiting_on}}"),
            stacked=True,
        ),
        bars(
            "Who waits for whom now",
            "Current values.",
            Query(f"paceline:waiting:units{OF_SERVICE}", "{{service}} waits for {{waiting_on}}"),
            size=Size(6, 8),
        ),
        graph(
            "Where episodes spend their time",
            "Share of open episodes at each service.",
            Query("paceline:episodes:share", "{{waiting_on}}"),
            unit=units.PercentUnit,
            size=Size(6, 8),
            stacked=True,
            max_value=1,
        ),
    ]


def _jobs() -> Panels:
    seconds = rate("paceline_trainer_seconds_total")
    return [
        heading("Jobs"),
        graph(
            "What jobs wait for",
            "controller: no trainer started yet; trainer: it is working, starting or down; "
            "environment: its batch is not ready; store: the ledger does not answer either.",
            Query(
                "sum by (job, waiting_on) "
                f"(rate(paceline_job_wait_seconds_total{JOBS}[$__rate_interval]))",
                "{{job}} {{waiting_on}}",
            ),
            unit=units.PercentUnit,
            stacked=True,
        ),
        graph(
            "Time of trainers",
            "Share of the time of all ranks by phase; waiting is idle time.",
            Query(
                f"sum by (job, phase) ({seconds}) / on (job) group_left sum by (job) ({seconds})",
                "{{job}} {{phase}}",
            ),
            unit=units.PercentUnit,
            stacked=True,
            max_value=1,
        ),
    ]
