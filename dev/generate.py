"""Writes all generated files that are checked in; `--check` only compares them.

Each generator is a script whose `files()` returns the desired content by path.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from prose import wrapped

ROOT = Path(__file__).resolve().parents[1]
GENERATORS = (
    "dev/protos.py",
    "dev/operations.py",
    "dev/metrics_table.py",
    "dev/job_reference.py",
    "dev/layer_tensors.py",
    "dev/pictures.py",
    "dev/plugin_pages.py",
    "dev/recipes_table.py",
    "dev/pages/staleness.py",
    "dev/pages/modes.py",
    "dev/memory.py",
    "deploy/helm/crd.py",
    "deploy/helm/readme.py",
    "deploy/helm/schema.py",
    "deploy/monitoring/write.py",
    "benchmarks/chaos/page.py",
)
# Import paths of the scripts.
FOLDERS = ("benchmarks", "deploy/monitoring")
# Only generated files match these patterns: those that no generator writes are deleted.
OWNED = (
    "shared/paceline/v1/*_pb2*.py*",
    "deploy/helm/paceline/files/monitoring/dashboards/*.json",
)


def main(arguments: list[str]) -> int:
    """Write the files, or with `--check` list outdated ones (exit code 1)."""
    checks = arguments == ["--check"]
    sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]
    wanted: dict[Path, str] = {}
    stale: list[Path] = []
    for script in GENERATORS:
        made = {
            path: wrapped(text) if path.suffix == ".md" else text
            for path, text in runpy.run_path(str(ROOT / script))["files"]().items()
        }
        stale += (found := _different(made))
        if not checks:  # immediately, since later scripts import files of earlier ones
            _write(found, made)
        wanted |= made
    left_over = _left_over(wanted)
    if not checks:
        for path in left_over:
            path.unlink()
    for path in (*stale, *left_over):
        print(f"{path.relative_to(ROOT)}: {'outdated, run make generate' if checks else 'written'}")
    return 1 if checks and (stale or left_over) else 0


def _different(wanted: Mapping[Path, str]) -> list[Path]:
    return [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]


def _left_over(wanted: Mapping[Path, str]) -> list[Path]:
    there = [path for pattern in OWNED for path in ROOT.glob(pattern)]
    return [path for path in there if path not in wanted]


def _write(paths: Iterable[Path], content: Mapping[Path, str]) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content[path])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
