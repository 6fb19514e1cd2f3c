"""How busy every service is, who waits for whom, and which one holds the others up."""

from frame import SHARE_BUSY, Panels, Query, Size, bars, board, graph, heading, name
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from boards.choices import JOB, JOBS, SERVICE, rate

OF_SERVICE = '{service=~"$service"}'


def utilisation() -> Dashboard:
    """Busy shares, bubbles and the bottleneck."""
    return board(
        "utilisation",
        "Utilisation",
        "How busy every service is, who waits for whom, and which one holds the others up.",
        [*_bottleneck(), *_busy(), *_bubbles(), *_jobs()],
        variables=[JOB, SERVICE],
    )


def _bottleneck() -> Panels:
    return [
        heading("Bottleneck"),
        name(
            "Bottleneck",
            "The service to which most of the training time is due: waiting is followed from the "
            "trainer to the end of the chain. More of this service makes training faster.",
            Query("paceline:bottleneck", "{{service}}"),
            size=Size(6, 8),
        ),
        bars(
            "Share of the training time that is due to each",
            "About one in all while jobs are live. Of the gateway: share of time in which users "
            "wait for it.",
            Query("paceline:blame:ratio", "{{service}}"),
            unit=units.PercentUnit,
            size=Size(8, 8),
            most=1,
        ),
        graph(
            "The same over time",
            "When this changes hands, so does what to add.",
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
            "workers with a call, trainers at a step; of the others processor time.",
            Query(f"paceline:busy:ratio{OF_SERVICE}", "{{service}}"),
            unit=units.PercentUnit,
            most=1,
        ),
        bars(
            "Busy now",
            "Blue: has room. Green: well used. Orange: full; not bad in itself for a service "
            "that is meant to be the bottleneck.",
            Query(f"paceline:busy:ratio{OF_SERVICE}", "{{service}}"),
            unit=units.PercentUnit,
            steps=SHARE_BUSY,
            size=Size(6, 8),
            most=1,
        ),
        graph(
            "Stalled share",
            "Share of time in which processes did not run though they should have: frozen, short "
            "of processor time, or held up by their own work. Other figures of a service that is "
            "stalled say little.",
            Query(f"paceline:stalled:ratio{OF_SERVICE}", "{{service}}"),
            unit=units.PercentUnit,
            size=Size(6, 8),
            steps=((None, "green"), (0.3, "red")),
        ),
    ]


def _bubbles() -> Panels:
    return [
        heading("Bubbles"),
        graph(
            "Who waits for whom",
            "Mean number of episodes, ranks and calls of a service that wait for another one.",
            Query(f"paceline:waiting:units{OF_SERVICE}", "{{service}} waits for {{on}}"),
            stacked=True,
        ),
        bars(
            "Who waits for whom now",
            "The same at present.",
            Query(f"paceline:waiting:units{OF_SERVICE}", "{{service}} waits for {{on}}"),
            size=Size(6, 8),
        ),
        graph(
            "Where episodes spend their time",
            "Share of the open episodes that is at each service.",
            Query("paceline:episodes:share", "{{on}}"),
            unit=units.PercentUnit,
            size=Size(6, 8),
            stacked=True,
            most=1,
        ),
    ]


def _jobs() -> Panels:
    seconds = rate("paceline_trainer_seconds_total")
    return [
        heading("Jobs"),
        graph(
            "What jobs wait for",
            "controller: no trainer was started yet; trainer: it works, starts or is away; "
            "environment: its batch is not there; store: nor does the ledger answer.",
            Query(
                f"sum by (job, on) (rate(paceline_job_seconds_total{JOBS}[$__rate_interval]))",
                "{{job}} {{on}}",
            ),
            unit=units.PercentUnit,
            stacked=True,
        ),
        graph(
            "Time of trainers",
            "Share of the time of all ranks by phase. waiting is the bubble of the trainer.",
            Query(
                f"sum by (job, phase) ({seconds}) / on (job) group_left sum by (job) ({seconds})",
                "{{job}} {{phase}}",
            ),
            unit=units.PercentUnit,
            stacked=True,
            most=1,
        ),
    ]
