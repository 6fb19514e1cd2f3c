"""`dev/install.py`: uv installs the same as pip would, with pip as a fallback."""

import os
import runpy
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest

from paceline_harness.patience import PATIENCE_S

SCRIPT = Path(__file__).resolve().parents[2] / "dev" / "install.py"


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder with two versions of a distribution that is in no index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for version in ("1.0", "2.0"):
        info = f"paceline_test_leaf-{version}.dist-info"
        with zipfile.ZipFile(folder / f"paceline_test_leaf-{version}-py3-none-any.whl", "w") as one:
            one.writestr("paceline_test_leaf.py", "")
            one.writestr(
                f"{info}/METADATA",
                f"Metadata-Version: 2.1\nName: paceline-test-leaf\nVersion: {version}\n",
            )
            one.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            one.writestr(
                f"{info}/RECORD",
                f"paceline_test_leaf.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n",
            )
    return folder


def installed(folder: Path, wheels: Path, tools: Path, **variables: str) -> Distribution:
    """The distribution that the script installed into a new environment."""
    environment = folder / "venv"
    told = {
        **os.environ,
        "PIP_FIND_LINKS": f"{wheels} {os.environ.get('PIP_FIND_LINKS', '')}",
        "PATH": os.pathsep.join([str(tools), os.environ["PATH"]]),
        **variables,
    }
    command = [sys.executable, SCRIPT, environment, "paceline-test-leaf"]
    done = subprocess.run(command, env=told, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    (packages,) = environment.glob("lib/python*/site-packages")
    (found,) = distributions(name="paceline-test-leaf", path=[str(packages)])
    return found


def test_uv_honours_pip_constraints(tmp_path: Path, wheels: Path) -> None:
    cap = tmp_path / "cap.txt"
    cap.write_text("paceline-test-leaf<2\n")
    found = installed(tmp_path, wheels, Path(sys.executable).parent, PIP_CONSTRAINT=str(cap))
    assert found.version == "1.0"
    assert found.read_text("INSTALLER") == "uv"


def test_pip_installs_where_uv_fails(tmp_path: Path, wheels: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "uv").write_text("#!/bin/sh\nexit 3\n")
    (tools / "uv").chmod(0o755)
    found = installed(tmp_path, wheels, tools)
    assert found.version == "2.0"
    assert (found.read_text("INSTALLER") or "").strip() == "pip"


def test_the_files_of_a_version_are_those_of_the_main_index() -> None:
    of = runpy.run_path(str(SCRIPT))["uv_settings"]
    found = of({"extra-index-url": "https://a.example/simple\nhttps://b.example/simple"})
    assert found["UV_INDEX"].split() == ["https://pypi.org/simple", "https://a.example/simple"]
    assert found["UV_DEFAULT_INDEX"] == "https://b.example/simple"
    assert of({"index-url": "https://c.example"}) == {"UV_DEFAULT_INDEX": "https://c.example"}
