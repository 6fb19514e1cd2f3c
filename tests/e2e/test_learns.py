"""The demo, run like a user would: the reward on held-out tasks rises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.config.precision import fast_dtype

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_demo_learns(tmp_path: Path, demo_model: Path) -> None:
    results = tmp_path / "run"
    paceline = (sys.executable, "-m", "paceline.front.cli")
    job = ("run", "examples/arithmetic.yaml", "--set", f"model.path={demo_model}")
    run(*paceline, *job, "--run-dir", str(results), "--port", "0", "--quiet")
    summary = json.loads((results / "summary.json").read_text())
    assert summary["eval_reward_start"] <= 0.40
    assert summary["eval_reward_end"] >= 0.80
    assert summary["staleness_max"] <= 4
    assert summary["ledger_consistent"]
    rows = [json.loads(line) for line in (results / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "train"]
    assert len(steps) == summary["steps"]
    # The first batch is sampled by the weights that train on it, so both compute the same.
    assert abs(steps[0]["kl_behaviour"]) < (1e-6 if fast_dtype() == "float32" else 1e-2)
    assert (results / "reward.png").stat().st_size > 10_000
