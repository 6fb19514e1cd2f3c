"""A method, added to a copy of the tree by the steps of CONTRIBUTING ("Add a method")."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from paceline_harness.patience import PATIENCE_S
from paceline_harness.source_tree import copied_tree, env_of

pytestmark = pytest.mark.slow

# What is written by hand: three files in a new folder, and a line of `pyproject.toml`.
FOLDER = "shared/paceline/methods/halved"
FILES = {
    "__init__.py": '''"""Halved: half of every weight (arXiv 0000.00000).

It shows what a new method takes.
"""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import Method, Plugin, StrictModel, declares


@declares(needs=("entropy",))
class HalvedOptions(StrictModel):
    """Options of `halved`."""

    share: float = Field(default=0.5, gt=0.0)
    """What is left of a weight."""


METHOD = Method(
    stage="control",
    evidence="notes",
    claim="none",
    parts={"corrections": {"halved": Plugin(".correction:halved", HalvedOptions)}},
)
''',
    "correction.py": '''"""Lowers every weight."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.methods.halved import HalvedOptions
from paceline.methods.parts.batch import TokenBatch


def halved(tokens: TokenBatch, options: HalvedOptions) -> Tensor:
    """`share` of each token."""
    return torch.full_like(tokens.behaviour, options.share)
''',
    "recipe.yaml": "trainer: {objective: {corrections: [{kind: halved, share: 0.25}]}}\n",
}
GROUP = '[project.entry-points."paceline.methods"]\n'
ENTRY_POINT = 'halved = "paceline.methods.halved:METHOD"\n'
# The tables of methods and of options.
TABLES = """
import runpy
for script in ("recipes_table", "job_reference"):
    for text in runpy.run_path(f"dev/{script}.py")["files"]().values():
        print(*(line for line in text.splitlines() if "`halved`" in line), sep="\\n")
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with the method."""
    folder = copied_tree(tmp_path_factory.mktemp("tree"))
    (folder / FOLDER).mkdir()
    for name, text in FILES.items():
        (folder / FOLDER / name).write_text(text)
    project = folder / "pyproject.toml"
    assert project.read_text().count(GROUP) == 1
    project.write_text(project.read_text().replace(GROUP, GROUP + ENTRY_POINT))
    return folder


@pytest.fixture(scope="module")
def environment(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the copy is installed, with its entry points."""
    built = tmp_path_factory.mktemp("built")
    command = (sys.executable, "-m", "hatchling", "build", "-t", "wheel:editable", "-d", str(built))
    subprocess.run(command, cwd=tree, check=True, timeout=PATIENCE_S)
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(built / "installed")
    paths = env_of(tree)
    paths["PYTHONPATH"] = os.pathsep.join((str(built / "installed"), paths["PYTHONPATH"]))
    return {name: value for name, value in paths.items() if not name.startswith("PYTEST_")}


def test_a_method_takes_a_folder_and_an_entry_point(
    tree: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    def said_by(*words: str) -> str:
        command = (sys.executable, *words)
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    listed = said_by("-m", "paceline.front.cli", "recipes")
    assert ["halved", "control", "notes", "Halved:"] in [x.split()[:4] for x in listed.splitlines()]
    rows = said_by("-c", TABLES)
    assert "| `halved` | `entropy` | notes |" in rows
    assert "| `halved` | `share` (`0.5`, > 0) |" in rows
    # The contract of its part, and the checks of its options at submit.
    modules = ("tests/contract/test_plugins.py", "tests/unit/paceline/config/test_part_options.py")
    flags = ("-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'inner'}", "-k", "halved")
    assert "4 passed" in said_by("-m", "pytest", *flags, *modules)
