"""`kill -9` of any one of the seven kinds of process during a job: it still succeeds."""

import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

KINDS = ("gateway", "controller", "experience", "environment", "reward", "rollout", "trainer")
pytestmark = pytest.mark.slow


def kill_and_finish(
    platform: Any, job: dict[str, Any], until: Callable[..., None], kill: Callable[[str], int]
) -> dict[str, Any]:
    with platform.client() as client:
        job_id = client.submit(job).status.job_id
        until(lambda: client.get(job_id).status.step >= 4, "no progress", 120)
        victim = kill(job_id)
        until(lambda: not psutil.pid_exists(victim), "the victim lives on", 20)
        status = client.wait(job_id, timeout_s=180).status
        assert status.state == "succeeded", f"{status.reason}\n{platform.logs()}"
        report = client.audit(job_id)
        assert report.ok, report.problems
        return dict(status.summary)


@pytest.mark.parametrize("kind", KINDS)
def test_the_job_survives_and_the_ledger_is_clean(
    kind: str, platform: Any, tiny_job: Callable[..., Any], until: Callable[..., None]
) -> None:
    def kill(job_id: str) -> int:
        shared = kind not in {"rollout", "trainer"}
        name = next(n for n in platform.names() if n.startswith(kind) and (shared or job_id in n))
        pid = platform.pid_of(name)
        os.kill(pid, signal.SIGKILL)
        return int(pid)

    job = tiny_job(name=f"kill-{kind}", stop={"steps": 40})
    summary = kill_and_finish(platform, job, until, kill)
    assert summary["steps"] == 40
    assert summary["staleness_max"] <= 4


def test_a_trainer_rank_may_die_without_its_launcher(
    platform: Any, tiny_job: Callable[..., Any], until: Callable[..., None]
) -> None:
    def kill(job_id: str) -> int:
        name = next(n for n in platform.names() if n.startswith("trainer") and job_id in n)
        rank = psutil.Process(platform.pid_of(name)).children()[-1]
        rank.kill()
        return int(rank.pid)

    kill_and_finish(platform, tiny_job(name="kill-rank", stop={"steps": 40}), until, kill)
