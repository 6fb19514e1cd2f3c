"""The demo's model, shared by the tests that train it."""

import hashlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from paceline.files import locked

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "arithmetic" / "make_model.py"


@pytest.fixture(scope="session")
def demo_model(pytestconfig: pytest.Config) -> Path:
    """The model as built by the demo's script, which takes a minute, so it is cached.

    One of several test processes builds it while the others wait.
    """
    source = SCRIPT.read_bytes() + version("torch").encode()
    kept = pytestconfig.cache.mkdir("models") / hashlib.sha256(source).hexdigest()[:16]
    command = [sys.executable, str(SCRIPT), "--seed", "3", "--out", str(kept)]
    with locked(kept.with_suffix(".lock")):
        done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return kept
