"""The contents of a release, built from the files that the image builds include."""

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from paceline_harness.patience import PATIENCE_S
from paceline_rollout.engines import PLUGINS as ENGINES

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "deploy" / "helm" / "paceline" / "files" / "monitoring"


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of the wheel by name."""
    folder = tmp_path_factory.mktemp("wheel")
    for allowed in allowed_in_builds():
        source, target = ROOT / allowed, folder / "source" / allowed
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, target, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, target)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, "."]
    done = subprocess.run(
        command, cwd=folder / "source", capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    with ZipFile(path) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist()}


def allowed_in_builds() -> list[str]:
    """What `.dockerignore` lets through."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    assert patterns[0] == "*"
    return [pattern[1:] for pattern in patterns if pattern.startswith("!")]


def test_it_has_the_packages_and_nothing_of_tests(content: dict[str, bytes]) -> None:
    packages = {path.parent.name for path in (ROOT / "services").glob("*/__init__.py")}
    folders = {name.partition("/")[0] for name in content if ".dist-info/" not in name}
    assert folders == {"paceline", *packages}
    assert not [name for name in content if "harness" in name or "double" in name]


def test_its_only_simulation_is_an_engine_that_jobs_may_name(content: dict[str, bytes]) -> None:
    """What tries decisions on made-up jobs is of the tests: nobody installs it to train."""
    words = ("simulat", "rehears", "fake", "dummy", "mock")
    named = [name for name in content if any(word in name.lower() for word in words)]
    assert named == ["paceline_rollout/engines/simulated.py"]
    assert "simulated" in ENGINES.parts["engines"]


def test_it_has_every_module(content: dict[str, bytes]) -> None:
    for root in (ROOT / "shared", ROOT / "services"):
        there = {str(path.relative_to(root)) for path in root.rglob("*.py")}
        assert there <= set(content)


def test_it_has_the_rules_and_dashboards_of_the_chart(content: dict[str, bytes]) -> None:
    there = {
        f"paceline/platform/telemetry/monitoring/{path.relative_to(MONITORING)}": path.read_bytes()
        for path in MONITORING.rglob("*.*")
    }
    assert len(there) > 10
    assert there.items() <= content.items()
