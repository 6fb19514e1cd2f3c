"""Writes Grafana's dashboards, and the chart's copies of all that is for monitoring.

`--check` compares: exit code 1 if a file is not current.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from boards import ALL
from grafana_foundation_sdk.cog.encoder import JSONEncoder

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "shared" / "paceline" / "monitoring"
CHART = ROOT / "deploy" / "helm" / "paceline" / "files" / "monitoring"
FOLDERS = ("dashboards", "rules")


def main(arguments: list[str]) -> int:
    """Write the files, or with `--check` say which are not current."""
    wanted = files()
    if arguments == ["--check"]:
        stale = [path for path, text in wanted.items() if _read(path) != text]
        stale += [path for path in _there() if path not in wanted]
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not current: make dashboards", file=sys.stderr)
        return 1 if stale else 0
    shutil.rmtree(CHART, ignore_errors=True)
    for path in _there():
        if path not in wanted:
            path.unlink()
    for path, text in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


def files() -> dict[Path, str]:
    """Every file that is written, with its content."""
    made = {f"dashboards/{_slug(board)}.json": board for board in (make() for make in ALL)}
    found = {
        name: json.dumps(board, cls=JSONEncoder, indent=1, sort_keys=True) + "\n"
        for name, board in made.items()
    }
    rules = {f"rules/{path.name}": path.read_text() for path in (PACKAGE / "rules").glob("*.yaml")}
    written = {PACKAGE / name: text for name, text in found.items()}
    copied = {CHART / name: text for name, text in (found | rules).items()}
    return written | copied


def _slug(board: object) -> str:
    return str(getattr(board, "uid")).removeprefix("paceline-")  # noqa: B009


def _there() -> list[Path]:
    ours = list((PACKAGE / "dashboards").glob("*.json"))
    return ours + [path for path in CHART.rglob("*") if path.is_file()]


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
