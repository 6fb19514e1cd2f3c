"""Former names of modules work for a release: code of jobs, plug-ins and scripts have them."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest

NAMES = {
    "paceline.digest": "paceline.platform.digest",
    "paceline.client": "paceline.front.client",
    "paceline.client.client": "paceline.front.client.client",
    "paceline.client.curves": "paceline.front.client.curves",
}
PROGRAMS = {
    "paceline.cli": ("--help",),
    "paceline.server.issue_keys": ("keys",),
}


@pytest.mark.parametrize(("old", "new"), NAMES.items())
def test_a_former_name_has_the_same_content(old: str, new: str) -> None:
    sys.modules.pop(old, None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        former, module = import_module(old), import_module(new)
    assert any(f"{old} is {new} now" == str(item.message) for item in caught)
    names = [name for name in vars(module) if not name.startswith("_")]
    public = getattr(module, "__all__", names)
    assert public
    assert all(getattr(former, name) is getattr(module, name) for name in public)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_former_program_runs(program: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error::ImportWarning", "-m", program, *PROGRAMS[program]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
