"""The ledger: episodes admitted, trained on and dropped, with reasons."""

from frame import BAD_IF_ANY, Panels, Query, Size, board, graph, grid, heading, number
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from boards.choices import JOB, JOBS


def ledger() -> Dashboard:
    """Flow of episodes, leases and consistency."""
    return board(
        "ledger",
        "Ledger",
        "Episodes and groups by state, drops by reason, and consistency of the ledger.",
        [*_flow(), *_states(), *_consistency()],
        variables=[JOB],
    )


def _flow() -> Panels:
    admitted = f"rate(paceline_admitted_episodes_total{JOBS}[$__rate_interval])"
    trained = f"rate(paceline_trained_episodes_total{JOBS}[$__rate_interval])"
    dropped = f"rate(paceline_dropped_episodes_total{JOBS}[$__rate_interval])"
    return [
        heading("Admitted, trained, dropped"),
        graph(
            "Admitted and trained",
            "Episodes per second.",
            Query(f"sum by (job) ({admitted})", "{{job}} admitted"),
            Query(f"sum by (job) ({trained})", "{{job}} trained"),
            unit=units.CountsPerSecond,
            size=Size(8, 8),
        ),
        graph(
            "Dropped by reason",
            "Episodes per second. stale: too old to train on; filtered: by the job's filters; "
            "exhausted_attempts: failed too often; oversized: above a limit.",
            Query(f"sum by (reason) ({dropped})", "{{reason}}"),
            unit=units.CountsPerSecond,
            stacked=True,
            size=Size(8, 8),
        ),
        number(
            "Trained share",
            "Episodes trained on divided by episodes admitted, over the time range.",
            Query(
                f"sum(increase(paceline_trained_episodes_total{JOBS}[$__range])) / "
                f"sum(increase(paceline_admitted_episodes_total{JOBS}[$__range]))"
            ),
            unit=units.PercentUnit,
            size=Size(4, 8),
            steps=((None, "red"), (0.5, "orange"), (0.8, "green")),
        ),
        number(
            "Trained tokens",
            "Policy tokens trained on divided by tokens sampled, over the time range.",
            Query(
                f"sum(increase(paceline_trained_tokens_total{JOBS}[$__range])) / "
                'sum(increase(paceline_sampled_tokens_total{job=~"$job", purpose="train"}'
                "[$__range]))"
            ),
            unit=units.PercentUnit,
            size=Size(4, 8),
            steps=((None, "red"), (0.5, "orange"), (0.8, "green")),
        ),
    ]


def _states() -> Panels:
    return [
        heading("States"),
        graph(
            "Episodes",
            "Unfinished episodes, by state.",
            Query(
                'sum by (state) (paceline_episodes{job=~"$job", state!~"trained|durable|dropped"})',
                "{{state}}",
            ),
            stacked=True,
            size=Size(8, 8),
        ),
        graph(
            "Groups",
            "open: in progress; ready: for a batch; headroom: could be admitted.",
            Query(f"sum by (job, state) (paceline_groups{JOBS})", "{{job}} {{state}}"),
            size=Size(8, 8),
        ),
        graph(
            "Staleness",
            "Trained samples per second by staleness in optimiser steps (upper bound).",
            Query(
                f"sum by (le) (rate(paceline_staleness_steps_bucket{JOBS}[$__rate_interval]))",
                "up to {{le}}",
            ),
            unit=units.CountsPerSecond,
            size=Size(8, 8),
        ),
        graph(
            "Attempts and lost leases",
            "Leases granted and expired per second, and data losses of the store.",
            Query(f"sum(rate(paceline_attempts_total{JOBS}[$__rate_interval]))", "granted"),
            Query(f"sum(rate(paceline_leases_expired_total{JOBS}[$__rate_interval]))", "expired"),
            Query(
                f"sum(rate(paceline_store_losses_total{JOBS}[$__rate_interval]))", "store losses"
            ),
            unit=units.CountsPerSecond,
            size=Size(8, 8),
        ),
        graph(
            "Last sample",
            "Time since the last trajectory of the job was submitted.",
            Query(f"max by (job) (paceline_sample_age_seconds{JOBS})", "{{job}}"),
            unit=units.Seconds,
            size=Size(8, 8),
            steps=((None, "green"), (600, "red")),
        ),
        graph(
            "Payload",
            "Size of trajectories in the store.",
            Query(f"sum by (job) (paceline_payload_bytes{JOBS})", "{{job}}"),
            unit=units.BytesIEC,
            size=Size(8, 8),
        ),
    ]


def _consistency() -> Panels:
    return [
        heading("Consistency"),
        number(
            "Inconsistent ledgers",
            "Jobs whose episode counts by state do not add up to the admitted episodes.",
            Query(f"sum(paceline_ledger_inconsistent{JOBS})"),
            size=Size(4, 6),
            steps=BAD_IF_ANY,
        ),
        number(
            "Problems",
            "Problems found by the last verification.",
            Query(f"sum(paceline_ledger_problems{JOBS})"),
            size=Size(4, 6),
            steps=BAD_IF_ANY,
        ),
        grid(
            "Dropped over the time range",
            "Episodes by job and reason.",
            Query(
                f"sum by (job, reason) (increase(paceline_dropped_episodes_total{JOBS}[$__range]))"
            ),
            size=Size(16, 6),
        ),
    ]
