"""No service imports what lies in the folder that it is started in."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from paceline.config.service import ServiceSettings
from paceline.enums import WorkerKind
from paceline.front.local.ports import PortSlots
from paceline.front.local.processes import Processes
from paceline_controller.jobs.plan import Wanted
from paceline_controller.runtimes.process import ProcessRuntime
from paceline_harness.runtime import MadeUpCredentials

HOSTILE = """
import os
os.open({marker!r}, os.O_CREAT)
raise SystemExit("imported from the working directory")
"""


@pytest.mark.parametrize("kind", list(WorkerKind))
def test_the_working_directory_is_not_on_the_import_path(
    kind: WorkerKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, marker = tmp_path / "here", tmp_path / "imported"
    here.mkdir()
    for module in ("yaml", "json", "pydantic", "grpc", "torch", f"paceline_{kind}"):
        (here / f"{module}.py").write_text(HOSTILE.format(marker=str(marker)))
    monkeypatch.chdir(here)
    settings = ServiceSettings(
        kind=WorkerKind.CONTROLLER, worker_id="controller-0", run_dir=tmp_path / "run"
    )
    runtime = ProcessRuntime(
        settings,
        credentials=MadeUpCredentials(),
        ports=PortSlots(tmp_path / "ports.json"),
        beat=tmp_path / "beat",
        child_grace_s=1.0,
    )
    missing = tmp_path / "settings.yaml"
    wanted = Wanted(str(kind), kind, job_id="job")
    processes = Processes(folder=tmp_path / "processes", logs=tmp_path / "logs")
    processes.start("it", runtime.command_of(wanted, missing), mark=str(missing))
    while processes.alive("it"):
        time.sleep(0.05)
    assert not marker.exists(), processes.last_words("it")
    assert f"{missing}: no such file" in processes.last_words("it", lines=200)
