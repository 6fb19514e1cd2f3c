"""A controller that is killed at any change of a file leaves nothing of a job for ever."""

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.config import ServiceSettings
from paceline.enums import WorkerKind
from paceline.front.local.ports import PortSlots
from paceline.platform.files import read_json
from paceline.platform.server.settings_file import write_settings
from paceline.platform.transport.service_keys import issue
from paceline_controller.jobs.plan import Wanted
from paceline_controller.runtimes.process import ProcessRuntime
from paceline_experience.jobs.job_files import JobFiles
from paceline_harness.patience import PATIENCE_S
from paceline_harness.runtime import MadeUpCredentials

JOB = "a-1"
OTHER = "a-1-2"  # whose name begins like that of the job
MOST = 200  # changes of files
"""Each fork starts and stops a worker, and is killed before its N-th change of a file."""
DIES = f"""
import asyncio, os, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_process_files import life

root = Path(sys.argv[1])
for number in range({MOST}):
    folder = root / f"run{{number:03}}"
    folder.mkdir()
    child = os.fork()
    if child == 0:
        left = [number]
        def access(event, arguments, left=left, folder=folder):
            changes = event in ("os.rename", "os.remove", "os.link", "os.mkdir")
            if not changes and (event != "open" or not arguments[2] & (os.O_WRONLY | os.O_RDWR)):
                return
            if folder.name in str(arguments[0]):
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)
        sys.addaudithook(access)
        asyncio.run(life(folder))
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        break
"""
"""Its last fork is not killed."""


def runtime(run_dir: Path) -> ProcessRuntime:
    keys = issue(run_dir.with_name(f"keys-{run_dir.name}"), [WorkerKind.CONTROLLER])
    settings = ServiceSettings(
        kind=WorkerKind.CONTROLLER,
        worker_id="controller-0",
        run_dir=run_dir,
        service_keys=keys[WorkerKind.CONTROLLER],
    )
    return ProcessRuntime(
        settings,
        credentials=MadeUpCredentials(),
        ports=PortSlots(run_dir / "ports.json"),
        beat=run_dir / "beat",
        child_grace_s=1.0,
        command=lambda wanted, path: [
            sys.executable,
            "-c",
            "import time; time.sleep(600)",
            str(path),
        ],
    )


def worker(job_id: str) -> Wanted:
    return Wanted(f"rollout-{job_id}-0", WorkerKind.ROLLOUT, job_id=job_id)


async def life(run_dir: Path) -> None:
    made = runtime(run_dir)
    await made.start(worker(JOB), incarnation=1)
    await made.stop(worker(JOB).name, grace_s=60)
    await made.start(worker(JOB), incarnation=2)
    await made.stop(worker(JOB).name, grace_s=60)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    program = tmp_path / "dies.py"
    program.write_text(DIES)
    return tmp_path


async def test_nothing_is_left_of_a_deleted_job(runs: Path) -> None:
    done = subprocess.run([sys.executable, runs / "dies.py", runs], timeout=PATIENCE_S, check=False)
    assert done.returncode == 0
    folders = sorted(runs.glob("run*"))
    assert 20 < len(folders) < MOST
    for folder in folders:
        made = runtime(folder)
        for found in await made.list():
            await made.stop(found.name, grace_s=60)
        assert await made.list() == []
        other = worker(OTHER).name
        settings = ServiceSettings(kind=WorkerKind.ROLLOUT, worker_id=other, job_id=OTHER)
        write_settings(folder / "settings" / f"{other}.yaml", settings)
        (folder / "logs").mkdir(exist_ok=True)
        (folder / "logs" / f"{other}.log").touch()
        JobFiles(folder).remove(JOB)
        keys = folder.with_name(f"keys-{folder.name}")
        every = (path.name for each in (folder, keys) for path in each.rglob("*"))
        left = {name for name in every if JOB in name}
        assert left == {f"{other}.yaml", f"{other}.log"}, folder.name
        assert read_json(folder / "ports.json") in (None, {})
