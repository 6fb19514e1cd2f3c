"""Writes the locks of the images: every distribution that an image installs, with its hashes.

    python dev/locks.py

One lock per extra, for Linux and every Python that the images have; torch and what it needs come
from the base of an image instead. Resolves with uv, from the index that pip is configured with,
and writes no address of it. A lock that the index still satisfies keeps its versions; delete the
file, or pass `--upgrade`, to take newer ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import install

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "docker" / "locks"
LIGHT = ("controller", "environment", "experience", "gateway", "reward", "tracking")
ON_TORCH = ("local", "rollout", "trainer")
"""Extras of images whose base has torch."""
BUILD = ("cyclonedx-bom>=7,<8", "hatchling>=1.26,<2")
"""Tools of the build stages, which are in no image: the bill of materials and the build backend."""
_NEVER = "python_version < '3'"


def main(arguments: list[str]) -> int:
    """Write all locks; returns 1 if one cannot be resolved."""
    LOCKS.mkdir(exist_ok=True)
    codes = [_lock(name, ["pyproject.toml", "--extra", name], arguments) for name in LIGHT]
    with tempfile.TemporaryDirectory() as folder:
        override, tools = Path(folder, "override.txt"), Path(folder, "tools.in")
        override.write_text(f"torch ; {_NEVER}\n")
        tools.write_text("\n".join(BUILD) + "\n")
        for name in ON_TORCH:
            source = ["pyproject.toml", "--extra", name, "--override", str(override)]
            codes.append(_lock(name, source, arguments))
        codes.append(_lock("build", [str(tools)], arguments))
    return int(any(codes))


def _lock(name: str, source: list[str], more: list[str]) -> int:
    environment = Path(sys.prefix)
    settings = install.UV_DEFAULTS | install.uv_settings(install.pip_settings(environment))
    command = [
        *(install.uv(environment) or "uv", "pip", "compile", "-q", *source, *more),
        *("-c", "constraints.txt", "--universal", "--python-version", "3.11"),
        *("--generate-hashes", "--no-annotate", "--no-header", "--no-emit-index-url"),
        *("--no-emit-find-links", "-o", str(LOCKS / f"{name}.txt")),
    ]
    return subprocess.run(command, env=settings | os.environ, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
