"""`--trust FOLDER`: plug-ins of a folder that nobody has installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from paceline_harness.models.folders import write_readable_model
from paceline_harness.patience import PATIENCE_S

EXAMPLES = Path(__file__).parents[5] / "examples" / "plugins"
LOSS = """
import no_such_package_here
from pydantic import Field
from paceline.plugins import StrictModel

class CapOptions(StrictModel):
    cap: float = Field(default=2.0, gt=0)

def capped(tokens, options: CapOptions):
    return no_such_package_here.loss(tokens)
"""
ADVANTAGE = "def mean(batch, context):\n    return batch.rewards - batch.rewards.mean()\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job with an advantage in its code and a loss in another folder."""
    for name, text in (("losses/own_losses.py", LOSS), ("task/control.py", ADVANTAGE)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    (tmp_path / "model").mkdir()
    write_readable_model(tmp_path / "model")
    job = {
        "name": "both",
        "model": {"path": "model"},
        "tasks": {"environment": "arithmetic"},
        "sampling": {"max_tokens": 4, "max_context": 32},
        "code": {"path": "task"},
        "reward": ["exact"],
        "experience": {"advantage": "control:mean"},
        "trainer": {"objective": {"surrogate": {"kind": "own_losses:capped", "cap": 1.5}}},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    return tmp_path


def validated(folder: Path, *words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "paceline.front.cli", "validate", "job.yaml", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)
    return done.returncode, done.stdout + done.stderr


def test_an_advantage_of_the_code_and_a_trusted_loss_are_in_one_job(folder: Path) -> None:
    assert validated(folder, "--trust", "losses") == (0, "job.yaml: ok\n")
    code, told = validated(folder)
    assert (code, "'own_losses:capped' is not a function that jobs may name" in told) == (2, True)


def test_every_kind_of_plug_in_of_a_trusted_folder_has_its_name(folder: Path) -> None:
    job = yaml.safe_load((EXAMPLES / "job.yaml").read_text())
    job["model"] = {"path": "model"}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    code, told = validated(folder, "--trust", str(EXAMPLES), "--set", "sampling.max_context=32")
    assert (code, told) == (0, "job.yaml: ok\n")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("json", "'json' is a module that is installed or of Python; rename it"),
        ("numpy", "'numpy' is a module that is installed or of Python; rename it"),
        ("", "there are no Python files in"),
    ],
)
def test_a_folder_that_would_hide_modules_is_not_trusted(
    folder: Path, name: str, told: str
) -> None:
    (folder / "mine").mkdir()
    if name:
        (folder / "mine" / f"{name}.py").write_text("def loss(tokens, options): ...\n")
    code, said = validated(folder, "--trust", "mine")
    assert (code, told in said) == (2, True), said


def test_a_folder_that_is_not_there(folder: Path) -> None:
    assert validated(folder, "--trust", "nowhere")[1].startswith(
        "paceline: --trust nowhere: is not"
    )
