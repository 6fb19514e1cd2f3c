"""The demo on real SGLang servers, run like a user would.

In CI it has a few steps on one server, in which weights change while it generates (a job with two
is in `tests/faults/test_kill_sglang.py`); that it learns as the demo does on our own engine is seen
in all of its steps, on two.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline_harness.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1500)]


@pytest.mark.parametrize(
    ("steps", "rise"), [(12, None), pytest.param(20, 0.25, marks=pytest.mark.extended)]
)
def test_the_demo_trains_on_servers(
    tmp_path: Path, sglang_python: str, demo_model: Path, steps: int, rise: float | None
) -> None:
    results = tmp_path / "run"
    job = ["run", "examples/arithmetic-sglang.yaml", "--set", f"model.path={demo_model}"]
    # In bfloat16, log-probs depend on the rows that are computed together.
    job += ["--set", "model.dtype=float32", "--set", "trainer.dtype=float32"]
    # On a loaded machine servers start so slowly that the first evaluation would be given up.
    job += ["--set", f"eval.timeout_s={3 * PATIENCE_S}", "--set", f"stop.steps={steps}"]
    job += [] if rise else ["--set", "eval.tasks=20", "--set", "rollout.replicas=1"]
    pools = tmp_path / "pools.yaml"
    engines = {"sglang": {"python": sglang_python}}
    pools.write_text(json.dumps({"pools": {"default": {"engines": engines}}}))
    job += ["--pools", str(pools)]
    command = [sys.executable, "-m", "paceline.front.cli", *job, "--run-dir", str(results)]
    done = subprocess.run(
        [*command, "--port", "0", "--quiet"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((results / "summary.json").read_text())
    assert summary["steps"] == steps
    if rise:
        assert summary["eval_reward_start"] <= 0.45
        assert summary["eval_reward_end"] >= summary["eval_reward_start"] + rise
    assert summary["ledger_consistent"]
    assert summary["staleness_max"] <= 4
    # Weights did change while servers generated, and every token says which made it.
    assert summary["versions_sampled"] == summary["versions_checked"] >= 3
    assert summary["mismatch_tokens"] >= 100
    assert summary["mismatch_kl"] <= 1e-8
    assert summary["logprob_diff_max"] <= 1e-4
