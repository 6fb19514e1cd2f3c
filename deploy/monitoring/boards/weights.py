"""Weights on their way: versions, bytes, time, troubles."""

from frame import Panels, Query, Size, board, graph, heading, number
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from boards.choices import JOB, JOBS, rate

SENT = '{job=~"$job", direction="out"}'


def weights() -> Dashboard:
    """Who has which version, and what its way there cost."""
    return board(
        "weights",
        "Weights",
        "Versions of workers, bytes and seconds of the broadcast, and its troubles.",
        [*_versions(), *_transfers(), *_troubles()],
        variables=[JOB],
    )


def _versions() -> Panels:
    return [
        heading("Versions"),
        graph(
            "Published",
            "Newest version that the trainer announced.",
            Query(f"max by (job) (paceline_version{JOBS})", "{{job}}"),
            size=Size(6, 8),
        ),
        graph(
            "Active",
            "Oldest and newest version with which workers sample.",
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
            "By worker; the bound follows from max_staleness and publish_every of the job.",
            Query(f"max by (job, instance) (paceline_version_lag{JOBS})", "{{instance}}"),
            Query(f"max by (job) (paceline_version_lag_bound{JOBS})", "bound of {{job}}"),
            size=Size(6, 8),
        ),
        graph(
            "Age",
            "Since the weights of a worker became active.",
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
            "Bytes per second that workers pull, whole or as differences.",
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
            "Differences",
            "Share of the received bytes that came as differences.",
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
            "Time of a version",
            "Seconds of all workers and trainers by stage, for each version that was published. "
            "Only swap stops sampling.",
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
        heading("Troubles"),
        graph(
            "Troubles",
            "stalled, slow, failed: a sender was left for another; damaged: a digest did not "
            "match; superseded: a newer version came under way.",
            Query(
                f"sum by (job, event) ({rate('paceline_weight_events_total')})",
                "{{job}} {{event}}",
            ),
        ),
        number(
            "Damaged",
            "Chunks whose digest did not match, since the processes began. They were refused and "
            "fetched again.",
            Query('sum(paceline_weight_events_total{job=~"$job", event="damaged"}) or vector(0)'),
            size=Size(6, 8),
            steps=((None, "green"), (1, "red")),
        ),
    ]
