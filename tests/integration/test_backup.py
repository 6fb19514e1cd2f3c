"""Backup and restore of store and checkpoints during a job, as described in docs/backup.md."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from redis import Redis

from paceline.enums import JobState
from paceline.front.client.client import Client
from paceline_harness.patience import PATIENCE_S


def copy_store(run_dir: Path, to: Path) -> None:
    """Copy the append-only files of a running store; no rewrite may replace them meanwhile."""
    socket = json.loads((run_dir / "store.json").read_text())["socket"]
    with Redis(unix_socket_path=socket) as store:
        (before,) = store.config_get("auto-aof-rewrite-percentage").values()
        assert before is not None
        store.config_set("auto-aof-rewrite-percentage", 0)
        assert store.info("persistence")["aof_rewrite_in_progress"] == 0
        shutil.copytree(run_dir / "store" / "appendonlydir", to / "store" / "appendonlydir")
        store.config_set("auto-aof-rewrite-percentage", before)


def copy_files(run_dir: Path, to: Path) -> None:
    """A file that vanishes before it is copied is outdated or temporary."""
    try:
        shutil.copytree(run_dir / "jobs", to / "jobs")
    except shutil.Error as error:
        problems: list[tuple[str, str, str]] = error.args[0]
        assert all("[Errno 2]" in why for _, _, why in problems), problems


def step_of(client: Client, job_id: str) -> int:
    return client.get(job_id).status.step


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_resumes_from_a_backup_with_a_clean_audit(
    tmp_path: Path,
    start_platform: Callable[..., Any],
    tiny_job: Callable[..., dict[str, Any]],
    until: Callable[..., None],
) -> None:
    first, copy, gate = tmp_path / "first", tmp_path / "copy", tmp_path / "gate"
    lost = start_platform(first)
    # Four groups make a step: however long the copies take, the job stays before step 21.
    reward = {
        "kind": "gated",
        "gate": str(gate),
        "pattern": "[0-4]",
        "from_group": 80,
        "timeout_s": 300.0,
    }
    job = tiny_job(
        reward=[reward],
        trainer={"optimizer": {"lr": 1e-4}, "checkpoint": {"every": 5, "keep": 3}},
        stop={"steps": 40},
    )
    with lost.client() as client:
        job_id = client.submit(job).status.job_id
        until(lambda: step_of(client, job_id) >= 12, "step 12 was not reached", 240)
        copy_store(first, copy)
        copy_files(first, copy)
        assert client.get(job_id).status.state is JobState.RUNNING
    lose(lost)

    restored = start_platform(copy)
    with restored.client() as client:
        assert client.get(job_id).status.state is JobState.RUNNING
        gate.touch()
        status = client.wait(job_id, timeout_s=PATIENCE_S).status
        assert status.state is JobState.SUCCEEDED, f"{status.reason}\n{restored.logs()}"
        assert status.step == 40
    command = [sys.executable, "-m", "paceline.front.cli", "verify", job_id, "--run-dir", str(copy)]
    audit = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    restored.stop()


def lose(platform: Any) -> None:
    """Kill everything, as if the machine were gone."""
    heads = [psutil.Process(pid) for pid in platform.pids().values()]
    family = [platform.up, *heads, *(child for head in heads for child in head.children(True))]
    for process in family:
        with suppress(psutil.NoSuchProcess):  # some end with those that have started them
            process.kill()
    platform.up.wait(PATIENCE_S)
