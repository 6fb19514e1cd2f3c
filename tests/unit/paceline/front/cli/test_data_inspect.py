"""`paceline data inspect` tells of answers that rewards cannot compare as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.config import JobSpec
from paceline.environments.dataset.tasks import DatasetTasks
from paceline.front.cli.data import Prompts, answer_warnings
from paceline_harness.data import InProcess


def warnings_of(folder: Path, answers: list[Any], *rewards: dict[str, Any]) -> list[str]:
    rows = folder / "rows"
    rows.mkdir()
    lines = [json.dumps({"question": f"{n}?", "answer": each}) for n, each in enumerate(answers)]
    (rows / "rows.jsonl").write_text("\n".join(lines))
    data = InProcess(uploaded=str(rows), cache=str(folder / "cache"))
    source = DatasetTasks(0, data=data, split="all", sources=[{"path": ""}])
    job = {"name": "a", "model": {"path": "m"}, "tasks": {"environment": "dataset"}, "eval": None}
    spec = JobSpec.model_validate({**job, "reward": rewards})
    return answer_warnings(spec, Prompts("training", source, {}), 2000)


@pytest.mark.parametrize("reward", ["exact", "environment"])
def test_decimals_and_missing_answers_are_counted(tmp_path: Path, reward: str) -> None:
    missing, decimal = warnings_of(tmp_path, [2.0, 3.0, None, 2.5], {"kind": reward})
    assert missing.startswith("training: 'answer' of 1 of 4 tasks is missing")
    assert decimal.startswith("training: 'answer' of 2 of 4 tasks is a decimal such as ")
    assert "numeric: true" in decimal


def test_answers_that_can_be_compared_are_fine(tmp_path: Path) -> None:
    assert warnings_of(tmp_path, ["2.0", 3, "x", 2.5], {"kind": "exact"}) == []


@pytest.mark.parametrize("reward", [{"kind": "exact", "numeric": True}, {"kind": "numeric"}])
def test_rewards_that_compare_numbers_take_decimals(tmp_path: Path, reward: dict[str, Any]) -> None:
    assert warnings_of(tmp_path, [2.0, 3.0], reward) == []
