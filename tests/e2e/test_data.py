"""Rows of users through all services: sent along, on a volume, in worlds of their own."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.enums import JobState
from paceline.errors import InvalidError
from paceline.isolation.sandbox import landlock
from paceline_harness.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
WORLD = """
import json
from paceline.plugins import EnvironmentPlugin


class World:
    replayable = True

    def reset(self, task, seed):
        self.row = json.loads(task.payload)
        return self.row["question"]

    def step(self, action):
        return "", 1.0 if self.row["id"].startswith("row-") else 0.0, True


ENVIRONMENT = EnvironmentPlugin(tasks="own_rows:never_called", world="own_rows:World")
"""


@pytest.fixture(scope="module")
def platform(
    tmp_path_factory: pytest.TempPathFactory, start_platform: Callable[..., Any]
) -> Iterator[Any]:
    """One whose jobs may read the folders of the tests, in which its run directory is too."""
    folder = str(tmp_path_factory.getbasetemp())
    made = start_platform(tmp_path_factory.mktemp("run"), "--data-folder", folder)
    yield made
    made.stop()


def write(path: Path, count: int) -> Path:
    rows = (
        {"problem": {"a": n % 10, "b": n // 10}, "final": str(n % 10 + n // 10), "id": f"row-{n}"}
        for n in range(count)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def options(path: str, *others: dict[str, Any], **more: Any) -> dict[str, Any]:
    columns = {"a": "problem.a", "b": "problem.b", "answer": "final", "id": "id"}
    rows = {"path": path, "columns": columns, "template": "{a}+{b}="}
    return {"sources": [rows | more, *others], "heldout_share": 0.3}


def test_rows_that_come_with_a_job_are_trained_though_experience_dies(
    platform: Any, tiny_job: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    write(tmp_path / "rows.jsonl", 100)
    other = {"environment": "arithmetic", "options": {"digits": 1}, "weight": 1}
    tasks = {"environment": "dataset", "options": options("", other, weight=3)}
    job = tiny_job(name="rows", tasks=tasks, stop={"steps": 6})
    with platform.client() as client:
        with pytest.raises(InvalidError, match=r"data of the job|come with the job"):
            client.submit(job)
        wrong = tiny_job(name="rows", tasks={"environment": "dataset"}, eval=None)
        with pytest.raises(InvalidError, match=r"rows.jsonl: line 1: has none of the columns"):
            client.submit(wrong, data=tmp_path / "rows.jsonl")
        job_id = client.submit(job, data=tmp_path / "rows.jsonl").status.job_id
        psutil.Process(platform.pid_of("experience")).send_signal(signal.SIGKILL)
        ended = client.wait(job_id, timeout_s=PATIENCE_S)
        assert ended.status.state is JobState.SUCCEEDED, ended.status.reason
        report = client.verify(job_id)
        rows = client.list_trajectories(job_id).trajectories
    assert report.ok, report.problems
    assert rows


@pytest.mark.skipif(landlock.abi() < 6, reason="needs Landlock with scopes")
def test_rows_of_a_volume_in_a_world_of_the_job(
    platform: Any, tiny_job: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    path = write(tmp_path / "rows.jsonl", 60)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "own_rows.py").write_text(WORLD)
    source = {"kind": "dataset", **options(str(path))}
    tasks = {"environment": "own_rows:ENVIRONMENT", "source": source}
    job = tiny_job(name="volume", tasks=tasks, stop={"steps": 3}, eval=None)
    job |= {"code": {"path": str(tmp_path / "own")}, "reward": [{"kind": "environment"}]}
    with platform.client() as client:
        job_id = client.submit(job).status.job_id
        ended = client.wait(job_id, timeout_s=PATIENCE_S)
        assert ended.status.state is JobState.SUCCEEDED, ended.status.reason
        rows = client.list_trajectories(job_id).trajectories
    assert rows
    assert all(row.score.reward == 1.0 for row in rows)


def test_a_job_whose_file_has_changed_fails_and_no_other(
    platform: Any, tiny_job: Callable[..., dict[str, Any]], tmp_path: Path, until: Any
) -> None:
    path = write(tmp_path / "changing.jsonl", 80)
    tasks = {"environment": "dataset", "options": options(str(path))}
    job = tiny_job(name="changing", tasks=tasks, stop={"steps": 10_000}, eval=None)
    with platform.client() as client:
        job_id = client.submit(job).status.job_id
        kept = client.submit(tiny_job(name="kept", stop={"steps": 10_000}, eval=None))
        write(tmp_path / "new", 81).rename(path)
        psutil.Process(platform.pid_of("experience")).send_signal(signal.SIGKILL)
        ended = client.wait(job_id, timeout_s=PATIENCE_S)
        assert ended.status.state is JobState.FAILED
        assert "changing.jsonl has changed since the job was submitted" in ended.status.reason
        assert not client.get(kept.status.job_id).status.state.terminal
        client.cancel(kept.status.job_id)


def test_nobody_reads_the_run_directory(
    platform: Any,
    start_platform: Callable[..., Any],
    tiny_job: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    """With a folder around the run directory that jobs may read, and without any."""
    (tmp_path / "folder").symlink_to(platform.run_dir)
    (tmp_path / "token.jsonl").symlink_to(platform.run_dir / "token")
    write(tmp_path / "rows.jsonl", 40)
    audit = f"{platform.run_dir}/audit/experience-0.jsonl"
    pid = platform.pid_of("experience")
    paths = {
        audit: "run directory",
        f"{platform.run_dir}/audit": "run directory",
        f"{platform.run_dir}/audit/*.jsonl": "run directory",
        f"{tmp_path}/folder/audit/experience-0.jsonl": "run directory",
        f"{tmp_path}/token.jsonl": "run directory",
        f"/proc/self/root{audit}": "run directory",
        f"/proc/{pid}/root{audit}": "run directory",
        f"/proc/{pid}/fd/*": "may not read it",
        "/proc/self/environ": "may not read it",
        "/dev/stdin": "may not read it",
        f"file://{audit}": "may not read it",
        f"zip://a.jsonl::file://{audit}": "not allowed",
    }
    with platform.client() as client:
        for path, why in paths.items():
            wrong = tiny_job(tasks={"environment": "dataset", "options": options(path)}, eval=None)
            with pytest.raises(InvalidError, match=why):
                client.submit(wrong)
    bare = start_platform(tmp_path / "bare")
    with bare.client() as client:
        for path in (str(tmp_path / "rows.jsonl"), f"{bare.run_dir}/token", *paths):
            wrong = tiny_job(tasks={"environment": "dataset", "options": options(path)}, eval=None)
            with pytest.raises(InvalidError, match=r"may not read it|not allowed"):
                client.submit(wrong)
    bare.stop()
