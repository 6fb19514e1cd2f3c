"""Open episodes, time by stage, and failures."""

from frame import Panels, Query, Size, board, graph, heading, number
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from boards.choices import JOB, JOBS


def environment() -> Dashboard:
    """Environment workers, their environments, and failures."""
    return board(
        "environment",
        "Environment",
        "Open episodes, time by stage, and returned leases.",
        [*_episodes(), *_time(), *_failures()],
        variables=[JOB],
    )


def _episodes() -> Panels:
    return [
        heading("Episodes"),
        graph(
            "Open episodes",
            "Leased and running episodes by purpose, and available slots.",
            Query("sum by (purpose) (paceline_open_episodes)", "{{purpose}}"),
            Query('sum(paceline_capacity{service="environment"})', "slots"),
        ),
        graph(
            "Finished episodes",
            "Episodes scored and submitted per second, by worker.",
            Query(
                "sum by (instance) (rate(paceline_finished_episodes_total[$__rate_interval]))",
                "{{instance}}",
            ),
            unit=units.CountsPerSecond,
            size=Size(6, 8),
        ),
        graph(
            "Wanted episodes",
            "Episodes that are running, waiting or would be admitted.",
            Query(f"sum by (job) (paceline_wanted_episodes{JOBS})", "{{job}}"),
            size=Size(6, 8),
        ),
    ]


def _time() -> Panels:
    stages = f"rate(paceline_episode_seconds_total{JOBS}[$__rate_interval])"
    done = f"rate(paceline_submitted_episodes_total{JOBS}[$__rate_interval])"
    calls = "rate(paceline_environment_calls_total[$__rate_interval])"
    took = "rate(paceline_environment_call_seconds_total[$__rate_interval])"
    return [
        heading("Time"),
        graph(
            "Duration of an episode",
            "Mean seconds of a finished episode by stage.",
            Query(
                f"sum by (job, episode_stage) ({stages}) / on (job) group_left "
                f"sum by (job) ({done})",
                "{{job}} {{episode_stage}}",
            ),
            unit=units.Seconds,
            stacked=True,
        ),
        graph(
            "Duration of a call",
            "Mean seconds of reset, step and close of environments.",
            Query(f"sum by (call) ({took}) / sum by (call) ({calls})", "{{call}}"),
            unit=units.Seconds,
            size=Size(6, 8),
        ),
        graph(
            "Calls",
            "Calls to environments per second.",
            Query(f"sum by (call) ({calls})", "{{call}}"),
            unit=units.CountsPerSecond,
            size=Size(6, 8),
        ),
        graph(
            "What open episodes wait for",
            "Mean number of open episodes waiting for each service.",
            Query('paceline:waiting:units{service="environment"}', "{{waiting_on}}"),
            stacked=True,
        ),
        number(
            "Sampled tokens received",
            "Tokens per second received from rollout workers.",
            Query("sum(rate(paceline_received_tokens_total[$__rate_interval]))"),
            size=Size(6, 8),
        ),
        number(
            "Replicas",
            "Environment workers that answer.",
            Query('sum(paceline_ready_replicas{workload="environment"})'),
            size=Size(6, 8),
        ),
    ]


def _failures() -> Panels:
    back = "rate(paceline_given_back_episodes_total[$__rate_interval])"
    return [
        heading("Failures"),
        graph(
            "Returned leases",
            "Leases returned per second. infra_error: the environment, a rollout worker or a "
            "scorer failed; drain and version_gone are not failures.",
            Query(f"sum by (cause) ({back})", "{{cause}}"),
            unit=units.CountsPerSecond,
            size=Size(8, 8),
        ),
        graph(
            "Attempts per episode",
            "Leases granted per admitted episode; one is ideal.",
            Query(
                f"sum by (job) (rate(paceline_attempts_total{JOBS}[$__rate_interval])) / "
                f"sum by (job) (rate(paceline_admitted_episodes_total{JOBS}[$__rate_interval]))",
                "{{job}}",
            ),
            size=Size(8, 8),
        ),
        graph(
            "Expired leases",
            "Per second: the worker died, hung, or lost its connection.",
            Query(
                f"sum by (job) (rate(paceline_leases_expired_total{JOBS}[$__rate_interval]))",
                "{{job}}",
            ),
            unit=units.CountsPerSecond,
            size=Size(8, 8),
        ),
    ]
