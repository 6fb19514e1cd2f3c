"""A job succeeds although each of the seven kinds of process is killed by SIGKILL, one by one."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.errors import UnavailableError
from paceline_harness.patience import PATIENCE_S
from paceline_harness.processes import goes_on

KINDS = ("gateway", "trainer", "reward", "experience", "rollout", "controller", "environment")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
STEPS, HELD_FROM = 40, 36


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Steps from `HELD_FROM` on are held back until this file exists."""
    return tmp_path / "gate"


@pytest.fixture
def job(tiny_job: Callable[..., dict[str, Any]], gate: Path) -> dict[str, Any]:
    """A job that cannot finish before all processes were killed."""
    made = tiny_job(name="kill", stop={"steps": STEPS})
    reward = {"kind": "gated", "timeout_s": 600.0}
    held = {"gate": str(gate), "from_group": HELD_FROM * made["experience"]["batch_groups"]}
    return made | {"reward": [{**reward, **held, "pattern": "^[0-9]"}]}


def test_the_job_survives_and_the_ledger_is_clean(
    platform: Any, job: dict[str, Any], gate: Path, until: Callable[..., None]
) -> None:
    with platform.client() as client:
        job_id = client.submit(job).status.job_id

        def running(kind: str) -> list[psutil.Process]:
            own = job_id if kind in {"rollout", "trainer"} else ""
            pids = platform.pids(kind, own).values()
            return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]

        def reached(step: int) -> bool:
            with suppress(UnavailableError):  # while the gateway or experience restarts
                return client.get(job_id).status.step >= step
            return False

        for number, kind in enumerate(KINDS, 1):
            until(lambda step=4 * number: reached(step), f"no progress before {kind}", PATIENCE_S)
            victim = running(kind)[0]
            victim.kill()
            until(lambda victim=victim: not goes_on(victim), f"{kind} lives on")
            until(
                lambda kind=kind, victim=victim: any(
                    goes_on(each) and each != victim for each in running(kind)
                ),
                f"no new {kind}",
                120,
            )
        gate.touch()
        status = client.wait(job_id, timeout_s=PATIENCE_S).status
        assert status.state == "succeeded", f"{status.reason}\n{platform.logs()}"
        report = client.verify(job_id)
        assert report.ok, report.problems
    # Also what a controller starts that is a fork itself: else all tests take much longer.
    logs = [path.read_text() for path in (platform.run_dir / "logs").glob("*.log")]
    assert not [line for log in logs for line in log.splitlines() if "without the fork" in line]
    assert status.summary["steps"] == STEPS
    assert status.summary["staleness_max"] <= 4
