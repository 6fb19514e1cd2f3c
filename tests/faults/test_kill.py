"""A job succeeds despite SIGKILL of any one of the seven kinds of process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline_harness.processes import goes_on

KINDS = ("gateway", "controller", "experience", "environment", "reward", "rollout", "trainer")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
STEPS, HELD_FROM = 20, 10
Job = Callable[[str], dict[str, Any]]


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Steps from `HELD_FROM` on are held back until this file exists."""
    return tmp_path / "gate"


@pytest.fixture
def job_of(tiny_job: Callable[..., dict[str, Any]], gate: Path) -> Job:
    """A job that cannot finish before a process is killed."""

    def make(name: str) -> dict[str, Any]:
        job = tiny_job(name=name, stop={"steps": STEPS})
        reward = {"kind": "python", "function": "paceline_harness.gates:gated", "timeout_s": 600.0}
        held = {"gate": str(gate), "from_group": HELD_FROM * job["experience"]["batch_groups"]}
        return job | {"reward": [{**reward, **held, "pattern": "^[0-9]"}]}

    return make


def kill_and_finish(
    platform: Any,
    job: dict[str, Any],
    gate: Path,
    until: Callable[..., None],
    kill: Callable[[str], psutil.Process],
) -> dict[str, Any]:
    with platform.client() as client:
        job_id = client.submit(job).status.job_id
        until(lambda: client.get(job_id).status.step >= 4, "no progress", 300)
        victim = kill(job_id)
        gate.touch()
        until(lambda: not goes_on(victim), "the victim lives on")
        status = client.wait(job_id, timeout_s=500).status
        assert status.state == "succeeded", f"{status.reason}\n{platform.logs()}"
        report = client.verify(job_id)
        assert report.ok, report.problems
        return dict(status.summary)


@pytest.mark.parametrize("kind", KINDS)
def test_the_job_survives_and_the_ledger_is_clean(
    kind: str, platform: Any, job_of: Job, gate: Path, until: Callable[..., None]
) -> None:
    def kill(job_id: str) -> psutil.Process:
        shared = kind not in {"rollout", "trainer"}
        name = next(n for n in platform.names() if n.startswith(kind) and (shared or job_id in n))
        process = psutil.Process(platform.pid_of(name))
        process.kill()
        return process

    summary = kill_and_finish(platform, job_of(f"kill-{kind}"), gate, until, kill)
    assert summary["steps"] == STEPS
    assert summary["staleness_max"] <= 4
