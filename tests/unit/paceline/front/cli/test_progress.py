"""What is shown of a job that runs: rates, rewards, failures, and who waits."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from paceline.enums import JobState, Purpose
from paceline.front.api.documents import JobEvent, MetricRow
from paceline.front.cli.progress import JobProgress, Rate, main_eval_of, partial_eval, waiting
from paceline.platform.progress import LedgerProgress
from paceline.types import JobStatus


def event(step: int, tokens: int, **live: Any) -> JobEvent:
    row = MetricRow(
        index=step,
        step=step,
        kind=Purpose.TRAIN,
        values={"reward_mean": 0.5, "staleness_mean": 1.25},
    )
    status = JobStatus("a-1", "a", "default", JobState.RUNNING, step=step, eval_reward=0.25)
    return JobEvent(
        status=status, metrics=[row], live=LedgerProgress(tokens_generated=tokens, **live)
    )


def test_progress_shows_rates_rewards_and_waits() -> None:
    progress = JobProgress(target_steps=20)
    counts = {"trained": 10, "durable": 0}
    progress.update(event(1, 0, counts=counts, trainer_wait_total_s=0.0), 0.0)
    counts = {"trained": 10, "durable": 40}
    late = event(2, 5000, counts=counts, trainer_wait_total_s=1.0, headroom_groups=0)
    progress.update(late, 2.0)
    line = progress.line()
    for text in (
        "step 2/20",
        "reward 0.500",
        "staleness 1.25 steps",
        "tokens/s 2,500",
        "episodes/s 20.0",
    ):
        assert text in line
    assert "trainer for episodes (50% of the time), rollout for trainer" in line
    assert progress.table("a-1").row_count == len(progress.status) + 1


def test_the_time_that_is_left_follows_from_the_steps() -> None:
    def line(step: int, now_s: float, **of_status: Any) -> str:
        fields: dict[str, Any] = {"state": JobState.RUNNING, "runtime_s": now_s, "age_s": now_s + 5}
        fields |= of_status
        status = JobStatus("a-1", "a", "default", step=step, **fields)
        progress.update(JobEvent(status=status, metrics=[], live=LedgerProgress()), now_s)
        return progress.line()

    progress = JobProgress(target_steps=20)
    queued = line(0, 1.0, state=JobState.QUEUED, runtime_s=0.0)
    assert queued == "state queued  step 0/20  elapsed 6 s"  # nobody waits for anybody yet
    assert "left" not in line(0, 60.0)  # models are loaded
    assert "left" not in line(1, 100.0)
    told = line(3, 120.0)  # the last two steps took ten seconds each
    assert "elapsed 2 min  left about 2 min 50 s" in told
    assert "left about 2 min 50 s" in line(3, 125.0)  # until the next one is done
    progress.limit_s = 200.0
    assert "left about 1 min 10 s" in line(3, 130.0)
    assert "left" not in line(20, 190.0, state=JobState.SUCCEEDED)


def test_failing_attempts_are_shown_as_long_as_there_are_more() -> None:
    progress = JobProgress()
    failed = {"failed_attempts": 8, "last_failure": "scoring:f: KeyError: 'a' (scoring.py:3)"}
    progress.update(event(1, 0), 0.0)
    assert "failing" not in progress.line()
    progress.update(event(1, 0, **failed), 5.0)
    assert "failing 8 attempts of episodes so far, the last: scoring:f: KeyError" in progress.line()
    progress.update(event(1, 0, **failed), 30.0)
    progress.update(event(1, 0, **failed), 50.0)
    assert "failing" not in progress.line()
    progress.update(event(1, 0, **failed, back_off_s=8.0), 60.0)
    assert "failing 8 attempts of episodes so far; the next in 8 s, the last:" in progress.line()


def test_a_partial_eval_is_shown_next_to_the_complete_one() -> None:
    progress = JobProgress()
    values = {"reward": 0.0, "measured": 29, "of": 500, "complete": False}
    row = MetricRow(index=2, step=6, kind=Purpose.EVAL, values=values)
    status = JobStatus(
        "a-1", "a", "default", JobState.RUNNING, step=6, eval_reward=0.25, eval_step=4
    )
    progress.update(JobEvent(status=status, metrics=[row]), 0.0)
    partial = "0.250 (step 4); 0.000 at step 6 does not count: 29 of 500 measured"
    assert progress.status["held-out reward"] == partial
    nothing = {"reward": None, "measured": 0, "of": 500, "complete": False}
    assert partial_eval({"step": 0, **nothing}).startswith("no reward at step 0 does not count")
    row = MetricRow(index=3, step=4, kind=Purpose.EVAL, values={**values, "complete": True})
    progress.update(JobEvent(status=status, metrics=[row]), 0.0)
    assert progress.status["held-out reward"] == "0.250 (step 4)"


def test_all_evaluations_are_shown() -> None:
    progress = JobProgress(main_eval=main_eval_of({"eval": None, "evals": {"b": {}, "a": {}}}))
    status = JobStatus(
        "a-1", "a", "default", JobState.RUNNING, step=6, eval_reward=0.25, eval_step=6
    )
    rows = [
        MetricRow(index=index, step=6, kind=Purpose.EVAL, values={"complete": True, **values})
        for index, values in enumerate(
            (
                {"set": "a", "reward": 0.25, "pass@1": 0.25, "pass@4": 0.5, "maj@4": 0.125},
                {"set": "b", "reward": 0.5},
                {"set": "b", "reward": 0.75, "complete": False},
            )
        )
    ]
    progress.update(JobEvent(status=status, metrics=rows), 0.0)
    assert progress.status["held-out reward"] == "0.250 (step 6)"
    assert progress.status["held-out scores"] == "pass@1 0.250, maj@4 0.125, pass@4 0.500"
    assert progress.status["other evals"] == "b 0.500 (step 6)"
    assert main_eval_of({"eval": {"every": 1}, "evals": {"b": {}}}) == ""


def test_reasons_are_shown_as_they_are() -> None:
    progress = JobProgress()
    reason = "pip install 'paceline[gymnasium]' [/wrong]"
    status = JobStatus("a-1", "a", "default", JobState.FAILED, step=0, reason=reason)
    progress.update(JobEvent(status=status, metrics=[]), 0.0)
    with io.StringIO() as shown:
        Console(file=shown, width=200).print(progress.table("a-1"))
        assert f"failed: {reason}" in shown.getvalue()


def test_nobody_waits() -> None:
    assert waiting(0.0, 3) == "nobody"


def test_a_rate_needs_two_points_and_forgets_a_counter_that_fell() -> None:
    rate = Rate()
    rate.add(0.0, 10)
    assert rate.per_s is None
    rate.add(1.0, 30)
    assert rate.per_s == 20
    rate.add(2.0, 5)
    assert rate.per_s is None
