"""The wheels of Paceline and of the example plug-ins work in a new environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline_harness.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "plugins"
EXTRAS = "gateway,controller,environment,reward,experience,trainer,rollout"
TASKS = """
from paceline_example.copying.tasks import CopyingTasks
print(*(task.task_id for task in CopyingTasks(seed=0)))
"""
NAMES = {
    *("copying", "stripped", "beginning", "solved", "in_order"),
    *("batch_mean", "reinforce", "metered", "csv", "rarity", "near"),
}
WHERE = """
import importlib.util, paceline
print(paceline.__file__, importlib.util.find_spec("paceline_harness"))
"""


def said_by(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a program in isolation from this checkout's tests; returns its output."""
    environment = {name: each for name, each in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def built(project: Path, folder: Path) -> Path:
    said_by(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=project)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with both wheels and this one's dependencies."""
    folder = tmp_path_factory.mktemp("installed")
    wheels = [built(project, folder / project.name) for project in (ROOT, EXAMPLE)]
    venv.create(folder / "venv")
    programs = folder / "venv" / "bin"
    site = said_by(programs / "python", "-c", "import site; print(site.getsitepackages()[0])")
    # A path in a .pth file is searched last, and .pth files there are not read: an editable
    # Paceline is not found.
    borrowed = [each for each in sys.path if Path(each).name == "site-packages"]
    (Path(site.strip()) / "borrowed.pth").write_text("\n".join(borrowed))
    pip = (sys.executable, "-m", "pip", "--quiet", "--python", programs / "python")
    pip = (*pip, "install", "--no-index")
    said_by(*pip, "--force-reinstall", "--no-deps", *wheels)
    said_by(*pip, f"paceline[{EXTRAS}]")  # fails if anything is missing
    return programs


def test_a_clean_environment_has_only_the_wheel(installed: Path, tmp_path: Path) -> None:
    assert said_by(installed / "paceline", "--version", cwd=tmp_path).startswith("paceline ")
    file, harness = said_by(installed / "python", "-c", WHERE, cwd=tmp_path).split()
    assert Path(file).is_relative_to(installed.parent)
    assert harness == "None"
    listed = said_by(installed / "paceline", "plugins", cwd=tmp_path)
    assert {line.split()[1] for line in listed.splitlines()} >= NAMES


@pytest.mark.slow
def test_the_examples_fulfil_their_contracts(installed: Path, tmp_path: Path) -> None:
    pytest_ = (installed / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider")
    said_by(*pytest_, EXAMPLE / "tests", "--rootdir", tmp_path, cwd=tmp_path)


def test_a_recipe_has_several_parts(installed: Path, tmp_path: Path) -> None:
    shown = said_by(installed / "paceline", "recipes", "show", "rarity", cwd=tmp_path)
    assert "kind: near" in shown
    words = ("--resolved", "--set", "model.path=hub/model")
    told = said_by(installed / "paceline", "validate", EXAMPLE / "recipe.yaml", *words)
    job = yaml.safe_load(told)
    assert [each["kind"] for each in job["experience"]["advantage_shaping"]] == ["rarity"]
    assert [each["kind"] for each in job["trainer"]["objective"]["corrections"]] == ["near"]


@pytest.mark.slow
def test_a_job_uses_a_plug_in_of_each_kind_and_the_recipe(
    installed: Path, tmp_path: Path, tiny_job: Callable[..., dict[str, Any]]
) -> None:
    job = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    # In one job, as each starts all services. What the job file says goes before the recipe.
    job["recipe"] = "rarity"
    del job["trainer"]["objective"]["corrections"]
    # A random model rarely ends an answer or begins it well, which is all that the filter leaves.
    job["model"] = tiny_job()["model"]
    job["sampling"]["max_tokens"] = 8
    job["experience"]["group_size"] = 32
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    said_by(installed / "paceline", "run", "job.yaml", "--run-dir", "run", "--port=0", cwd=tmp_path)
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["state"], summary["steps"]) == ("succeeded", 3)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # A batch in which nothing is better than the rest trains nothing.
    trained = [row for row in rows if "capped_importance" in row]  # of the surrogate
    assert trained
    assert {row["near_zeroed"] for row in trained} == {0.0}
    seen = [row["times_seen"] for row in rows if "times_seen" in row]
    assert len(seen) >= len(trained)
    assert seen[0] == 0.0
    assert max(seen) > 0.0
    (values,) = run.glob("jobs/*/tracking/csv/values.csv")
    tracked = {line.split(";")[0] for line in values.read_text().splitlines()}
    assert {str(row) for row in range(len(rows))} <= tracked
    (told,) = run.glob("jobs/*/tracking/csv/summary.json")
    assert json.loads(told.read_text())["state"] == "succeeded"
    lines = [
        line for path in run.glob("jobs/*/trajectories/*") for line in path.read_text().splitlines()
    ]
    episodes = [json.loads(line) for line in lines]
    assert not any(episode["truncated"] for episode in episodes)  # those, the filter leaves out
    (order,) = said_by(installed / "python", "-c", TASKS).splitlines()
    for episode in episodes:
        assert episode["topology"] == "stripped"
        assert episode["provenance"]["engine"] == "metered-torch"
        assert set(episode["score"]["parts"]) == {"beginning", "beginning/share"}
        # The sampler takes one task after the other.
        number = int(episode["group_id"].rpartition(".")[2])
        assert episode["task_id"] == order.split()[number]
