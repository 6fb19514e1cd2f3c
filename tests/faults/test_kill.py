"""Jobs succeed although each of the seven kinds of process is killed by SIGKILL, one by one."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.errors import UnavailableError
from paceline.front.client.client import Client
from paceline_harness.patience import PATIENCE_S
from paceline_harness.processes import goes_on

OWN_KINDS = ("rollout", "trainer")
KINDS = ("gateway", "trainer", "reward", "experience", "rollout", "controller", "environment")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
STEPS, HELD_FROM = 40, 36
TASKS, SAMPLES, TURNS = 24, 2, 2


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


def check_measured(client: Client, job_id: str) -> None:
    """Each episode is there once, all of one version, whose tokens come from the same weights."""
    status = client.wait(job_id, timeout_s=PATIENCE_S).status
    assert (status.state, status.reason) == ("succeeded", "all tasks are measured")
    assert status.incarnation >= 2
    [row] = client.list_metrics(job_id).rows
    assert (row.values["measured"], row.values["dropped"]) == (TASKS, 0)
    assert 0.0 < row.values["reward"] < TURNS
    page = client.list_trajectories(job_id, page_size=100, purpose="eval")
    places = [(each.group_id, each.index) for each in page.trajectories]
    wanted = [(f"{job_id}.e0.{task}", n) for task in range(TASKS) for n in range(SAMPLES)]
    assert sorted(places) == sorted(wanted)
    transcripts = [t for each in page.trajectories for t in each.transcripts]
    versions = {run.version for t in transcripts for run in t.versions}
    assert versions == {status.version} == {0}
    report = client.verify(job_id)
    assert report.ok, report.problems


@pytest.fixture
def measuring(tiny_job: Callable[..., dict[str, Any]], gate: Path) -> dict[str, Any]:
    """A job without a trainer, of which half of the episodes are held back too."""
    options = {"turns": TURNS, "gate": str(gate)}
    made = tiny_job(name="measuring", kind="eval", reward=[{"kind": "environment"}])
    made["tasks"] = {"environment": "marking", "options": options, "step_timeout_s": 600.0}
    sampled = {"tasks": TASKS, "samples": SAMPLES, "temperature": 1.0, "timeout_s": 3600.0}
    return made | {"eval": sampled}


def test_the_jobs_survive_and_their_ledgers_are_clean(
    platform: Any,
    job: dict[str, Any],
    measuring: dict[str, Any],
    gate: Path,
    until: Callable[..., None],
) -> None:
    with platform.client() as client:
        job_id = client.submit(job).status.job_id
        measured_id = client.submit(measuring).status.job_id

        def running(kind: str, of: str) -> list[psutil.Process]:
            own = of if kind in OWN_KINDS else ""
            pids = platform.pids(kind, own).values()
            return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]

        def reached(step: int) -> bool:
            with suppress(UnavailableError):  # while the gateway or experience restarts
                return client.get(job_id).status.step >= step
            return False

        for number, kind in enumerate(KINDS, 1):
            until(lambda step=4 * number: reached(step), f"no progress before {kind}", PATIENCE_S)
            for of in dict.fromkeys((job_id, measured_id if kind in OWN_KINDS else job_id)):
                victim = running(kind, of)[0]
                victim.kill()
                until(lambda victim=victim: not goes_on(victim), f"{kind} lives on")
                until(
                    lambda kind=kind, of=of, victim=victim: any(
                        goes_on(each) and each != victim for each in running(kind, of)
                    ),
                    f"no new {kind}",
                    120,
                )
        gate.touch()
        check_measured(client, measured_id)
        status = client.wait(job_id, timeout_s=PATIENCE_S).status
        assert status.state == "succeeded", f"{status.reason}\n{platform.logs()}"
        report = client.verify(job_id)
        assert report.ok, report.problems
    # Also what a controller starts that is a fork itself: else all tests take much longer.
    logs = [path.read_text() for path in (platform.run_dir / "logs").glob("*.log")]
    assert not [line for log in logs for line in log.splitlines() if "without the fork" in line]
    assert status.summary["steps"] == STEPS
    assert status.summary["staleness_max"] <= 4
