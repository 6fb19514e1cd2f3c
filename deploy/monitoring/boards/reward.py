"""Scores: values, durations, failures."""

from frame import Panels, Query, Size, board, graph, heading, number
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from boards.choices import JOB, JOBS


def reward() -> Dashboard:
    """Rewards for researchers, and the workers that compute them."""
    return board(
        "reward",
        "Reward",
        "Rewards by part and their spread; speed and failures of reward workers.",
        [*_meaning(), *_workers()],
        variables=[JOB],
    )


def _meaning() -> Panels:
    return [
        heading("Rewards"),
        graph(
            "Reward",
            "Mean of the last batch (train) and of the last evaluation (eval).",
            Query(f"paceline_reward_mean{JOBS}", "{{job}} {{purpose}}"),
            size=Size(8, 8),
        ),
        graph(
            "Parts",
            "Mean of each part over the last batch.",
            Query(f"paceline_reward_part_mean{JOBS}", "{{job}} {{part}}"),
            size=Size(8, 8),
        ),
        graph(
            "Spread",
            "Standard deviation over the batch, and within groups. Without the latter there is "
            "nothing to learn.",
            Query(f"paceline_reward_std{JOBS}", "{{job}} batch"),
            Query(f"paceline_group_reward_std{JOBS}", "{{job}} group"),
            size=Size(8, 8),
        ),
        graph(
            "Groups without spread",
            "Share of groups with equal rewards: in the last batch, and among all scored groups.",
            Query(f"paceline_zero_variance_ratio{JOBS}", "{{job}} batch"),
            Query(
                f'sum by (job) (rate(paceline_finished_groups_total{{job=~"$job", variance="zero"}}'
                "[$__rate_interval])) / sum by (job) "
                f"(rate(paceline_finished_groups_total{JOBS}[$__rate_interval]))",
                "{{job}} scored",
            ),
            unit=units.PercentUnit,
            steps=((None, "green"), (0.9, "red")),
            max_value=1,
        ),
        graph(
            "Evaluations",
            "Reward, pass@k and maj@k of the last complete run of each evaluation.",
            Query(f"paceline_eval_score{JOBS}", "{{job}} {{evaluation}} {{score}}"),
            size=Size(24, 8),
        ),
        graph(
            "Length and truncation",
            "Policy tokens per episode.",
            Query(f"paceline_response_tokens_mean{JOBS}", "{{job}} mean"),
            Query(f"paceline_response_tokens_max{JOBS}", "{{job}} longest"),
            size=Size(6, 8),
        ),
        graph(
            "Truncated",
            "Share of truncated episodes in the last batch.",
            Query(f"paceline_truncated_ratio{JOBS}", "{{job}}"),
            unit=units.PercentUnit,
            size=Size(6, 8),
            steps=((None, "green"), (0.5, "orange")),
            max_value=1,
        ),
    ]


def _workers() -> Panels:
    scores = "rate(paceline_scores_total[$__rate_interval])"
    failed = 'rate(paceline_scores_total{status=~"infra_error|timeout"}[$__rate_interval])'
    return [
        heading("Workers"),
        graph(
            "Scores",
            "Answers scored per second. infra_error and timeout are retried, never a zero.",
            Query(f"sum by (status) ({scores})", "{{status}}"),
            unit=units.CountsPerSecond,
            stacked=True,
            size=Size(8, 8),
        ),
        number(
            "Failed",
            "Share of answers whose scorer crashed or timed out.",
            Query(f"(sum({failed}) or vector(0)) / sum({scores})"),
            unit=units.PercentUnit,
            size=Size(4, 8),
            steps=((None, "green"), (0.01, "orange"), (0.05, "red")),
        ),
        graph(
            "Duration of a score",
            "Mean seconds by part.",
            Query(
                "sum by (part) (rate(paceline_score_seconds_total[$__rate_interval])) / "
                "sum by (part) (rate(paceline_part_scores_total[$__rate_interval]))",
                "{{part}}",
            ),
            unit=units.Seconds,
            size=Size(6, 8),
        ),
        graph(
            "Queue",
            "Answers being scored or queued, as seen by workers and by the controller.",
            Query("sum(paceline_scores_in_progress)", "workers"),
            Query('sum(paceline_pending_scores{workload="reward"})', "controller"),
            size=Size(6, 8),
        ),
    ]
