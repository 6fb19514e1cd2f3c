"""The ledger: what was made, what was trained on, what was dropped and why."""

from frame import BAD_IF_ANY, Panels, Query, Size, board, graph, grid, heading, number
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from boards.choices import JOB, JOBS


def ledger() -> Dashboard:
    """Made, trained, dropped; leases; soundness."""
    return board(
        "ledger",
        "Ledger",
        "Episodes and groups by state, what was dropped and why, and whether the ledger is sound.",
        [*_flow(), *_states(), *_soundness()],
        variables=[JOB],
    )


def _flow() -> Panels:
    made = f"rate(paceline_admitted_episodes_total{JOBS}[$__rate_interval])"
    trained = f"rate(paceline_trained_episodes_total{JOBS}[$__rate_interval])"
    dropped = f"rate(paceline_dropped_episodes_total{JOBS}[$__rate_interval])"
    return [
        heading("Made, trained, dropped"),
        graph(
            "Made and trained",
            "Episodes per second.",
            Query(f"sum by (job) ({made})", "{{job}} made"),
            Query(f"sum by (job) ({trained})", "{{job}} trained"),
            unit=units.CountsPerSecond,
            size=Size(8, 8),
        ),
        graph(
            "Dropped by reason",
            "Episodes per second. stale: too old to train on; filtered: as the job asked; "
            "exhausted_attempts: failed too often; oversized: above a limit.",
            Query(f"sum by (reason) ({dropped})", "{{reason}}"),
            unit=units.CountsPerSecond,
            stacked=True,
            size=Size(8, 8),
        ),
        number(
            "Trained share",
            "Episodes trained on by episodes made, over the time shown.",
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
            "Policy tokens trained on by tokens sampled, over the time shown.",
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
            "That are not over yet, by state.",
            Query(
                'sum by (state) (paceline_episodes{job=~"$job", state!~"trained|durable|dropped"})',
                "{{state}}",
            ),
            stacked=True,
            size=Size(8, 8),
        ),
        graph(
            "Groups",
            "open: being made; ready: for a batch; headroom: would be admitted.",
            Query(f"sum by (job, state) (paceline_groups{JOBS})", "{{job}} {{state}}"),
            size=Size(8, 8),
        ),
        graph(
            "Staleness",
            "Trained samples per second by age in optimiser steps (at most).",
            Query(
                f"sum by (le) (rate(paceline_staleness_steps_bucket{JOBS}[$__rate_interval]))",
                "up to {{le}}",
            ),
            unit=units.CountsPerSecond,
            size=Size(8, 8),
        ),
        graph(
            "Attempts and lost leases",
            "Leases granted per second, leases that ran out, and losses of the store.",
            Query(f"sum(rate(paceline_attempts_total{JOBS}[$__rate_interval]))", "granted"),
            Query(f"sum(rate(paceline_leases_expired_total{JOBS}[$__rate_interval]))", "ran out"),
            Query(f"sum(rate(paceline_store_losses_total{JOBS}[$__rate_interval]))", "store lost"),
            unit=units.CountsPerSecond,
            size=Size(8, 8),
        ),
        graph(
            "Last sample",
            "Since a trajectory of the job came in.",
            Query(f"max by (job) (paceline_sample_age_seconds{JOBS})", "{{job}}"),
            unit=units.Seconds,
            size=Size(8, 8),
            steps=((None, "green"), (600, "red")),
        ),
        graph(
            "Payload",
            "Trajectories held in the store.",
            Query(f"sum by (job) (paceline_payload_bytes{JOBS})", "{{job}}"),
            unit=units.BytesIEC,
            size=Size(8, 8),
        ),
    ]


def _soundness() -> Panels:
    return [
        heading("Soundness"),
        number(
            "Identity broken",
            "Jobs whose states do not add up to what was made.",
            Query(f"sum(paceline_ledger_broken{JOBS})"),
            size=Size(4, 6),
            steps=BAD_IF_ANY,
        ),
        number(
            "Audit",
            "What the last audits found wrong.",
            Query(f"sum(paceline_ledger_problems{JOBS})"),
            size=Size(4, 6),
            steps=BAD_IF_ANY,
        ),
        grid(
            "Dropped over the time shown",
            "Episodes by job and reason.",
            Query(
                f"sum by (job, reason) (increase(paceline_dropped_episodes_total{JOBS}[$__range]))"
            ),
            size=Size(16, 6),
        ),
    ]
