"""Overview for the engineer on call and for users waiting for results."""

from frame import BAD_IF_ANY, Panels, Query, Size, bars, board, graph, grid, heading, name, number
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from boards.choices import JOB, JOBS

FIRING = 'ALERTS{alertname=~"Paceline.*", alertstate="firing"}'


def overview() -> Dashboard:
    """Jobs, their bottleneck, and failures."""
    return board(
        "overview",
        "Overview",
        "Live jobs, what they wait for, and what has failed.",
        [*_now(), *_learning(), *_flow(), *_broken()],
        variables=[JOB],
    )


def _now() -> Panels:
    running = Query('sum(paceline_jobs{state="running"})')
    return [
        heading("Now"),
        number("Running jobs", "Jobs whose trainer is running.", running),
        name(
            "Bottleneck",
            "The service that most of the training time is spent waiting for, and its share. "
            "See the dashboard Utilisation.",
            Query("paceline:bottleneck", "{{service}}"),
            size=Size(5, 4),
        ),
        number(
            "Sampled tokens",
            "Policy tokens per second sampled by rollout workers.",
            Query(f"sum(rate(paceline_generated_tokens_total{JOBS}[$__rate_interval]))"),
        ),
        number(
            "Trained tokens",
            "Policy tokens per second used for training.",
            Query(f"sum(rate(paceline_trained_tokens_total{JOBS}[$__rate_interval]))"),
        ),
        number(
            "Processes",
            "Processes that answer Prometheus.",
            Query("count(paceline_build_info)"),
            size=Size(3, 4),
        ),
        number(
            "Alerts",
            "Firing Paceline alerts; their runbooks are in docs/runbooks.md.",
            Query(f"count({FIRING}) or vector(0)"),
            steps=BAD_IF_ANY,
        ),
    ]


def _learning() -> Panels:
    return [
        heading("Learning"),
        graph(
            "Reward",
            "Mean reward of the last batch (train) and of the last evaluation (eval).",
            Query(f"paceline_reward_mean{JOBS}", "{{job}} {{purpose}}"),
        ),
        graph(
            "Step",
            "Optimiser steps; rewinds after a crash.",
            Query(f"paceline_step{JOBS}", "{{job}}"),
        ),
        grid(
            "Jobs",
            "One row per live job.",
            Query(f"sum by (job) (paceline_step{JOBS})"),
            Query(f"sum by (job) (paceline_version{JOBS})"),
            Query('avg by (job) (paceline_reward_mean{job=~"$job", purpose="train"})'),
            Query(f"avg by (job) (paceline_staleness_steps_mean{JOBS})"),
            Query(f"max by (job) (paceline_sample_age_seconds{JOBS})"),
            Query(f"max by (job) (paceline_trainer_waiting_seconds{JOBS})"),
            Query(f"max by (job) (paceline_no_progress_seconds{JOBS})"),
            Query(f"max by (job) (paceline_checkpoint_age_seconds{JOBS})"),
            columns=(
                *("step", "version", "reward", "staleness (steps)", "last sample (s ago)"),
                *("trainer waiting (s)", "no progress for (s)", "last checkpoint (s ago)"),
            ),
            size=Size(24, 7),
        ),
    ]


def _flow() -> Panels:
    return [
        heading("Flow"),
        graph(
            "Episodes",
            "Admitted, trained on and dropped per second. Those not trained on are wasted.",
            Query(
                f"sum(rate(paceline_admitted_episodes_total{JOBS}[$__rate_interval]))", "admitted"
            ),
            Query(f"sum(rate(paceline_trained_episodes_total{JOBS}[$__rate_interval]))", "trained"),
            Query(f"sum(rate(paceline_dropped_episodes_total{JOBS}[$__rate_interval]))", "dropped"),
            unit=units.CountsPerSecond,
        ),
        graph(
            "Where episodes spend their time",
            "Share of open episodes at each service; environment: in the environment itself.",
            Query("paceline:episodes:share", "{{waiting_on}}"),
            unit=units.PercentUnit,
            stacked=True,
            max_value=1,
        ),
        bars(
            "Busy",
            "Share of each service's capacity in use over the last five minutes.",
            Query("paceline:busy:ratio", "{{service}}"),
            unit=units.PercentUnit,
            max_value=1,
        ),
        bars(
            "Replicas",
            "Ready workers, and the number wanted by scaling.",
            Query("sum by (workload) (paceline_ready_replicas)", "{{workload}} ready"),
            Query("sum by (workload) (paceline_wanted_replicas)", "{{workload}} wanted"),
        ),
    ]


def _broken() -> Panels:
    return [
        heading("Failures"),
        grid(
            "Firing alerts",
            "Each has a section in docs/runbooks.md.",
            Query(f"max by (alertname, severity, job, service) ({FIRING})"),
            size=Size(12, 7),
        ),
        graph(
            "Restarts",
            "Processes that exited and were restarted, per hour.",
            Query("3600 * sum by (service) (rate(paceline_restarts_total[15m]))", "{{service}}"),
            size=Size(12, 7),
        ),
    ]
