"""What becomes of rows, loads and trajectories."""

from __future__ import annotations

import math
from typing import Any

import pytest

from paceline.config import parse_job
from paceline.config.tracking import TrackingSpec
from paceline.enums import Purpose, WorkerKind
from paceline.errors import ConfigError
from paceline.platform.progress import LedgerProgress
from paceline.types import Worker
from paceline_tracking.history import TrackedRow
from paceline_tracking.points import Rates, flat, point_of
from paceline_tracking.secrets import without_secrets
from paceline_tracking.trackers.tables import markdown


def worker(name: str, pid: int = 1, **load: float) -> Worker:
    return Worker(
        worker_id=name, kind=WorkerKind.ROLLOUT, endpoint="", site="local", load=load, pid=pid
    )


def test_numbers_of_a_row_get_paths_and_the_rest_is_left_out() -> None:
    values = {"loss": 1, "ok": True, "none": None, "text": "x", "bad": math.nan, "by": {"a": 2.5}}
    assert flat(values, "train") == {"train/loss": 1.0, "train/ok": 1.0, "train/by/a": 2.5}


def test_a_row_without_a_version_gets_the_last_known_one() -> None:
    assert point_of(TrackedRow(0, 1, Purpose.TRAIN, {"loss": 1.0}), version=3).version == 3
    assert point_of(TrackedRow(0, 1, Purpose.EVAL, {"version": 5}), version=3).version == 5


def test_an_eval_that_measured_too_little_has_a_curve_of_its_own() -> None:
    values = {"reward": 0.0, "measured": 29, "of": 500, "complete": False}
    told = point_of(TrackedRow(0, 1, Purpose.EVAL, values), version=3).values
    assert "eval/reward" not in told
    assert (told["eval/partial_reward"], told["eval/of"], told["eval/complete"]) == (0.0, 500, 0)
    whole = point_of(TrackedRow(0, 1, Purpose.EVAL, values | {"complete": True}), version=3).values
    assert (whole["eval/reward"], "eval/partial_reward" in whole) == (0.0, False)
    named = point_of(TrackedRow(0, 1, Purpose.EVAL, {**values, "set": "hard"}), version=3).values
    assert (named["eval/hard/partial_reward"], named["eval/hard/of"]) == (0.0, 500)
    assert not {name for name in named if not name.startswith("eval/hard/")}


def test_counters_are_logged_as_rates() -> None:
    rates = Rates()
    first = rates.system(
        LedgerProgress(tokens_generated=100, ready_groups=2),
        [worker("a", busy_s=1.0, tokens_generated=50, running=3)],
        now_s=10.0,
    )
    assert first == {
        "system/ready_groups": 2.0,
        "system/open_groups": 0.0,
        "system/headroom_groups": 0.0,
        "system/payload_bytes": 0.0,
        "system/rollout/workers": 1.0,
        "system/rollout/running": 3.0,
    }
    second = rates.system(
        LedgerProgress(tokens_generated=300, ready_groups=1),
        [
            worker("a", busy_s=2.0, cpu_s=9.0, tokens_generated=150, running=1),
            worker("b", running=4),
        ],
        now_s=12.0,
    )
    assert second["system/tokens_per_s"] == 100.0
    assert second["system/rollout/busy_share"] == 0.5
    assert second["system/rollout/tokens_generated_per_s"] == 50.0
    assert second["system/rollout/running"] == 5.0
    assert second["system/rollout/workers"] == 2.0
    assert "system/rollout/cpu_cores" not in second  # nothing to compare it with yet


def test_a_worker_that_starts_again_is_no_step_back() -> None:
    rates = Rates()
    rates.system(LedgerProgress(), [worker("a", tokens_generated=500)], now_s=0.0)
    again = rates.system(LedgerProgress(), [worker("a", pid=2, tokens_generated=5)], now_s=1.0)
    assert "system/rollout/tokens_generated_per_s" not in again


def test_a_cell_cannot_break_its_table() -> None:
    text = markdown([[1, "a|b\n`c`", "<script>", 0.5, "{}", 0, 1, False, "e"]])
    row = text.splitlines()[-1]
    assert row.replace("\\|", "").count("|") == 10
    assert "<script>" not in row


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("401 for key-1234567", "401 for ***"),
        ("http://me:pass@host/x", "http://***@host/x"),
        ("nothing", "nothing"),
    ],
)
def test_secrets_leave_messages(text: str, clean: str) -> None:
    assert without_secrets(text, {"WANDB_API_KEY": "key-1234567", "HOME": "nothing"}) == clean


JOB: dict[str, Any] = {
    "name": "j",
    "model": {"path": "m"},
    "tasks": {"environment": "arithmetic"},
    "reward": [{"kind": "exact"}],
}


@pytest.mark.parametrize(
    ("tracking", "message"),
    [
        ([{"kind": "wandb", "api_key": "hunter2"}], "api_key: a job file must not hold secrets"),
        ([{"kind": "wandb", "x": {"WRITE_TOKEN": "hunter2"}}], "x.WRITE_TOKEN: a job file"),
        ([{"kind": "mlflow", "a": ["https://u:hunter2@h"]}], "a.0: a job file must not"),
        ([{"kind": "trackio", "u": "http://h?write_token=hunter2"}], "u: a job file must not"),
        ([{"kind": "mine:tracker"}], "only installed ones may be named"),
        (["wandb", "wandb"], "two trackers are named 'wandb'"),
    ],
)
def test_job_files_must_not_hold_secrets(tracking: list[Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_job({**JOB, "tracking": tracking})
    assert message in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_two_of_a_kind_need_names() -> None:
    job = parse_job({**JOB, "tracking": ["wandb", {"kind": "wandb", "name": "team"}]})
    assert [each.label for each in job.tracking] == ["wandb", "team"]
    assert TrackingSpec(kind="wandb").timeout_s == 60.0
