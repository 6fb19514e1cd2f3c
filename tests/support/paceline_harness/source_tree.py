"""Copies of this source tree, for tests that change it by the steps of CONTRIBUTING."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def copied_tree(folder: Path) -> Path:
    """The folder, with all files of the tree that git tracks."""
    named = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    for name in filter(None, named.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def env_of(tree: Path) -> dict[str, str]:
    """An environment in which Python finds the copy before the installed tree."""
    folders = ("shared", "services")
    return os.environ | {"PYTHONPATH": os.pathsep.join(str(tree / each) for each in folders)}
