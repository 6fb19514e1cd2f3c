"""The models of the examples, shared by the tests that train them."""

import hashlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from paceline.platform.files import locked
from paceline_harness.patience import PATIENCE_S

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="session", autouse=True)
def forks_of_commands(forks: None) -> None:
    """Platforms that tests start by `paceline run` have the shared fork server too."""


@pytest.fixture(scope="session")
def demo_model(pytestconfig: pytest.Config) -> Path:
    """The demo's model."""
    return built(pytestconfig, EXAMPLES / "arithmetic", "--seed", "3")


@pytest.fixture(scope="session")
def tools_model(pytestconfig: pytest.Config) -> Path:
    """The small chat model that calls tools, with its tokenizer and template, hardly trained."""
    return built(pytestconfig, EXAMPLES / "tools", "tools", "--steps", "2")


def built(pytestconfig: pytest.Config, folder: Path, *options: str) -> Path:
    """A model as built by the script of its example, which takes a minute, so it is cached.

    One of several test processes builds it while the others wait.
    """
    scripts = [EXAMPLES / "warm_start.py", *sorted(folder.glob("*.py"))]
    source = "".join([*(path.read_text() for path in scripts), version("torch"), *options])
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    kept = pytestconfig.cache.mkdir("models") / digest
    command = [sys.executable, str(folder / "make_model.py"), *options, "--out", str(kept)]
    with locked(kept.with_suffix(".lock")):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=3 * PATIENCE_S, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return kept
