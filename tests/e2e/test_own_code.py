"""Code that comes with a job, honest and hostile, through all services."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.enums import JobState
from paceline.errors import InvalidError
from paceline.isolation.sandbox import landlock
from paceline_harness.packages.wheels import write_wheel
from paceline_harness.patience import PATIENCE_S
from paceline_harness.processes import goes_on

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(landlock.abi() < 6, reason="needs Landlock with scopes"),
]
STEPS = 4
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_code" / "task"
# One of 8 attempts does each deed, so that every step has some.
CODE = '''
import json, os, time
from paceline.plugins import EnvironmentPlugin

DEEDS = ("block", "raise", "loop", "memory", "fork", "exit")


def tasks(*, seed):
    return [{"number": number} for number in range(200)]


class World:
    replayable = True

    def __init__(self):
        self.turns = 0

    def reset(self, task, seed):
        self.task = json.loads(task.payload)
        self.deed = DEEDS[os.urandom(1)[0] % 6] if os.urandom(1)[0] % 8 == 0 else ""
        return "1+1="

    def step(self, action):
        self.turns += 1
        if self.turns == 1:
            deed, self.deed = self.deed, ""
            if deed == "block":
                time.sleep(60)
            elif deed == "raise":
                raise RuntimeError("hostile")
            elif deed == "loop":
                while True:
                    pass
            elif deed == "memory":
                bytearray(64 << 30)
            elif deed == "fork":
                os.fork()
            elif deed == "exit":
                os._exit(1)
        return "1+2=", 1.0, self.turns == 3


ENVIRONMENT = EnvironmentPlugin(tasks="own_world:tasks", world="own_world:World")


def score(item):
    """Never 0 for an episode that has ended."""
    return item.environment_reward + (len(item.response) % 3) / 10
'''


@pytest.fixture
def job(tiny_job: Callable[..., dict[str, Any]], tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "own_world.py").write_text(CODE)
    made = tiny_job(name="own", stop={"steps": STEPS})
    return made | {
        "code": {"path": str(folder)},
        "tasks": {"environment": "own_world:ENVIRONMENT", "step_timeout_s": 2.0},
        "eval": None,
        "reward": [{"kind": "own_world:score"}],
        "sampling": {"max_tokens": 4, "max_context": 32, "on_truncation": "score"},
    }


def test_a_hostile_environment_costs_nobody_an_episode(
    platform: Any, job: dict[str, Any], until: Callable[..., None]
) -> None:
    with platform.client() as client:
        job_id = client.submit(job).status.job_id
        ended = client.wait(job_id, timeout_s=PATIENCE_S)
        assert ended.status.state is JobState.SUCCEEDED, ended.status.reason
        rows = client.list_trajectories(job_id).trajectories
        report = client.verify(job_id)
    assert rows
    assert all(row.score.reward >= 1.0 for row in rows)
    assert report.ok, report.problems
    assert not report.dropped.get("invalid")


def test_what_the_code_requires_is_installed_and_used(
    platform: Any, job: dict[str, Any], until: Callable[..., None]
) -> None:
    folder = Path(job["code"]["path"])
    code = CODE.replace("import json", "import paceline_leaf, json", 1)
    code = code.replace('if os.urandom(1)[0] % 8 == 0 else ""', 'if False else ""')
    (folder / "own_world.py").write_text(code.replace("/ 10", "/ 10 + paceline_leaf.BONUS"))
    (folder / "requirements.txt").write_text("paceline_leaf==1.0\n")
    with platform.client() as client:
        with pytest.raises(InvalidError, match=r"requirements.txt: .*paceline_leaf==1.0"):
            client.submit(job)
        write_wheel(folder / "wheels", "paceline_leaf", files={"paceline_leaf.py": "BONUS = 5.0"})
        job_id = client.submit(job).status.job_id
        ended = client.wait(job_id, timeout_s=PATIENCE_S)
        assert ended.status.state is JobState.SUCCEEDED, ended.status.reason
        rows = client.list_trajectories(job_id).trajectories
    assert rows
    assert all(row.score.reward >= 6.0 for row in rows)


def test_a_filter_and_an_advantage_of_the_folder_train(
    platform: Any, tiny_job: Callable[..., dict[str, Any]]
) -> None:
    """As the example does."""
    experience: dict[str, Any] = {
        "batch_groups": 4,
        "group_size": 4,
        "filters": [{"kind": "control:spread", "least": 1e-9}],
        "advantage": {"kind": "control:smoothed", "decay": 0.5},
    }
    job = tiny_job(name="control", stop={"steps": STEPS}) | {
        "code": {"path": str(EXAMPLE)},
        "eval": None,
        "reward": [{"kind": "scoring:close_to", "scale": 20.0}],
        "experience": experience,
    }
    with platform.client() as client:
        wrong = experience | {"advantage": {"kind": "control:smoothed", "decay": 2.0}}
        with pytest.raises(InvalidError, match=r"experience.advantage.decay: .*less than 1"):
            client.submit(job | {"experience": wrong})
        job_id = client.submit(job).status.job_id
        ended = client.wait(job_id, timeout_s=PATIENCE_S)
        assert ended.status.state is JobState.SUCCEEDED, ended.status.reason
        rows = [row for row in client.list_metrics(job_id).rows if row.kind == "train"]
        report = client.verify(job_id)
    assert report.ok, report.problems
    assert len(rows) == STEPS
    assert len({row.values["advantage_deviation"] for row in rows}) == STEPS


def test_a_curriculum_of_the_folder_trains_while_experience_is_killed(
    platform: Any, tiny_job: Callable[..., dict[str, Any]], until: Callable[..., None]
) -> None:
    """As the example does: nothing is lost, and no task is drawn twice."""
    experience: dict[str, Any] = {
        "batch_groups": 4,
        "group_size": 4,
        "filters": [],
        "sampler": {"kind": "curriculum:Unsolved", "skip": 0.5},
        "allocator": {"kind": "curriculum:SecondWave", "first": 2},
    }
    job = tiny_job(name="curriculum", stop={"steps": 3 * STEPS}) | {
        "code": {"path": str(EXAMPLE)},
        "eval": None,
        "reward": [{"kind": "scoring:close_to", "scale": 20.0}],
        "experience": experience,
    }
    with platform.client() as client:
        wrong = experience | {"sampler": {"kind": "curriculum:Unsolved", "skip": 2.0}}
        with pytest.raises(InvalidError, match=r"experience.sampler.skip: .*equal to 1"):
            client.submit(job | {"experience": wrong})
        job_id = client.submit(job).status.job_id
        for step in (1, STEPS, 2 * STEPS):
            until(partial(_is_at, client, job_id, step), f"no step {step}", PATIENCE_S)
            os.kill(platform.pid_of("experience"), signal.SIGKILL)
        ended = client.wait(job_id, timeout_s=PATIENCE_S)
        assert ended.status.state is JobState.SUCCEEDED, ended.status.reason
        report = client.verify(job_id)
        rows = client.list_trajectories(job_id).trajectories
    assert report.ok, report.problems
    groups = {row.group_id for row in rows}
    assert len({name.split(".")[1] for name in groups}) == len(groups)  # each draw trained once


def _is_at(client: Any, job_id: str, step: int) -> bool:
    return client.get(job_id).status.step >= step


def test_nothing_of_a_cancelled_job_goes_on(
    platform: Any, job: dict[str, Any], until: Callable[..., None]
) -> None:
    def sealed() -> list[psutil.Process]:
        workers = [
            pid for kind in ("environment", "reward") for pid in platform.pids(kind).values()
        ]
        zygotes = [psutil.Process(pid).children() for pid in workers]
        return [child for each in zygotes for zygote in each for child in zygote.children()]

    with platform.client() as client:
        job_id = client.submit(job | {"stop": {"steps": 1000}}).status.job_id
        until(lambda: client.get(job_id).status.step >= 1, "no step", PATIENCE_S)
        until(lambda: len(sealed()) >= 2, "no sealed processes", PATIENCE_S)
        client.cancel(job_id, reason="the end of a test")
        until(lambda: not sealed(), "sealed processes of a cancelled job live on", 5)


def _has_descendants(process: psutil.Process, least: int) -> bool:
    return len(process.children(recursive=True)) >= least


def _are_gone(family: list[psutil.Process]) -> bool:
    return not any(map(goes_on, family))


def test_nothing_of_a_job_outlives_its_workers(
    platform: Any, job: dict[str, Any], until: Callable[..., None]
) -> None:
    with platform.client() as client:
        job_id = client.submit(job | {"stop": {"steps": 1000}}).status.job_id
        until(lambda: client.get(job_id).status.step >= 1, "no step", PATIENCE_S)
        for kind in ("environment", "reward"):
            (pid,) = platform.pids(kind).values()
            worker = psutil.Process(pid)
            # One that was at work for a worker that was killed has ended with it.
            has_sealed = partial(_has_descendants, worker, 2)
            until(has_sealed, f"{kind} has no sealed process")
            family = worker.children(recursive=True)
            os.kill(worker.pid, signal.SIGKILL)
            gone = partial(_are_gone, family)
            until(gone, f"children of {kind} live on")
        client.cancel(job_id, reason="the end of a test")


TRIED = """
from paceline.plugins import EnvironmentPlugin

Tasks = lambda *, seed: [{"fails": where} for where in ("world", "reward", "nowhere")]


class World:
    replayable = True

    def reset(self, task, seed):
        self.fails = "world" in task.payload
        return "1+1="

    def step(self, action):
        if self.fails:
            raise ValueError("this task has no answer")
        return "", 0.25, True


ENVIRONMENT = EnvironmentPlugin(tasks="tried:Tasks", world="tried:World")


def score(item):
    return {}["answer"] if "reward" in item.task.payload else item.environment_reward
"""


def test_a_few_episodes_are_shown_before_anything_is_trained(
    tiny_job: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "tried.py").write_text(TRIED)
    job = tiny_job(name="tried") | {
        "code": {"path": "tried.py"},
        "tasks": {"environment": "tried:ENVIRONMENT"},
        "reward": [{"kind": "tried:score"}],
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "paceline.front.cli", "try", str(tmp_path / "job.yaml")]
    ended = subprocess.run(
        [*command, "--episodes", "3", "--run-dir", str(run_dir)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert re.search(r"environment +'1\+1='\n +policy ", ended.stdout)
    assert "reward 0.25 (tried:score 0.25)" in ended.stdout
    failed = r"failed episode \d: infra_error: "
    world = r"environment: ValueError: this task has no answer \(tried.py:16\) \(5 attempts\)"
    assert re.search(failed + world, ended.stdout), ended.stdout
    reward = r"tried:score: KeyError: 'answer' \(tried.py:24\) \(5 attempts\)"
    assert re.search(failed + reward, ended.stdout), ended.stdout
    assert "1 of 3 episodes ended; mean reward 0.250" in ended.stdout
    # Nothing has been trained: no step, no checkpoint.
    (folder,) = (run_dir / "jobs").iterdir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {row["kind"] for row in rows} == {"eval"}
    assert not (folder / "checkpoints").exists()
