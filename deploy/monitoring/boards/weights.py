"""Weight broadcast: versions, bytes, time, failures."""

from frame import Panels, Query, Size, board, graph, heading, number
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from boards.choices import JOB, JOBS, rate

SENT = '{job=~"$job", direction="out"}'


def weights() -> Dashboard:
    """Versions held by workers, and the cost of transfers."""
    return board(
        "weights",
        "Weights",
        "Versions held by workers; bytes, time and failures of the broadcast.",
        [*_versions(), *_transfers(), *_troubles()],
        variables=[JOB],
    )


def _versions() -> Panels:
    return [
        heading("Versions"),
        graph(
            "Published",
            "Newest published version.",
            Query(f"max by (job) (paceline_version{JOBS})", "{{job}}"),
            size=Size(6, 8),
        ),
        graph(
            "Active",
            "Oldest and newest version that workers sample with.",
            Query(
                'min by (job) (paceline_weight_version{job=~"$job", state="active"})',
                "{{job}} oldest",
            ),
            Query(
                'max by (job) (paceline_weight_version{job=~"$job", state="active"})',
                "{{job}} newest",
            ),
            size=Size(6, 8),
        ),
        graph(
            "Versions behind",
            "By worker; the bound follows from the job's max_staleness and publish_every.",
            Query(f"max by (job, instance) (paceline_version_lag{JOBS})", "{{instance}}"),
            Query(f"max by (job) (paceline_version_lag_bound{JOBS})", "bound of {{job}}"),
            size=Size(6, 8),
        ),
        graph(
            "Age",
            "Time since the weights of a worker became active.",
            Query(f"max by (instance) (paceline_weights_age_seconds{JOBS})", "{{instance}}"),
            unit=units.Seconds,
            size=Size(6, 8),
        ),
    ]


def _transfers() -> Panels:
    moved = "rate(paceline_weight_bytes_total"
    return [
        heading("Transfers"),
        graph(
            "Received",
            "Bytes per second pulled by workers, in full or as deltas.",
            Query(
                f'sum by (job, kind) ({moved}{{job=~"$job", direction="in"}}[$__rate_interval]))',
                "{{job}} {{kind}}",
            ),
            unit=units.BytesPerSecondIEC,
            size=Size(8, 8),
        ),
        graph(
            "Sent",
            "By kind of sender. The trainer sends about one copy however many workers there are.",
            Query(
                f"sum by (job, service) ({rate('paceline_weight_bytes_total', SENT)})",
                "{{job}} {{service}}",
            ),
            unit=units.BytesPerSecondIEC,
            size=Size(8, 8),
        ),
        number(
            "Deltas",
            "Share of the received bytes that were deltas.",
            Query(
                '(sum(rate(paceline_weight_bytes_total{job=~"$job", direction="in", kind="delta"}'
                "[$__rate_interval])) or vector(0)) / "
                'sum(rate(paceline_weight_bytes_total{job=~"$job", direction="in"}'
                "[$__rate_interval]))"
            ),
            unit=units.PercentUnit,
            size=Size(8, 8),
        ),
        graph(
            "Time by stage",
            "Seconds that workers and trainers spend on weights, per second.",
            Query(
                f"sum by (service, stage) ({rate('paceline_weight_seconds_total')})",
                "{{service}} {{stage}}",
            ),
            unit=units.PercentUnit,
            stacked=True,
        ),
        graph(
            "Time per version",
            "Seconds of all workers and trainers by stage, per published version. "
            "Only swap pauses sampling.",
            Query(
                f"sum by (job, stage) (rate(paceline_weight_seconds_total{JOBS}[$__rate_interval]))"
                " / on (job) group_left () "
                f"(max by (job) (rate(paceline_version{JOBS}[$__rate_interval])) > 0)",
                "{{job}} {{stage}}",
            ),
            unit=units.Seconds,
            stacked=True,
        ),
    ]


def _troubles() -> Panels:
    return [
        heading("Failures"),
        graph(
            "Events",
            "stalled, slow, failed: the sender was replaced by another; damaged: a digest did not "
            "match; superseded: a newer version arrived during the transfer.",
            Query(
                f"sum by (job, event) ({rate('paceline_weight_events_total')})",
                "{{job}} {{event}}",
            ),
        ),
        number(
            "Damaged chunks",
            "Chunks whose digest did not match, since the start of the processes. They were "
            "rejected and refetched.",
            Query('sum(paceline_weight_events_total{job=~"$job", event="damaged"}) or vector(0)'),
            size=Size(6, 8),
            steps=((None, "green"), (1, "red")),
        ),
    ]
