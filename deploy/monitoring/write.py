"""Generates the Grafana dashboards as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from boards import ALL
from grafana_foundation_sdk.cog.encoder import JSONEncoder

FOLDER = Path(__file__).resolve().parents[1] / "helm" / "paceline" / "files" / "monitoring"


def files() -> dict[Path, str]:
    """Path and content of every dashboard."""
    return {
        FOLDER / "dashboards" / f"{_slug(board)}.json": json.dumps(
            board, cls=JSONEncoder, indent=1, sort_keys=True
        )
        + "\n"
        for board in (make() for make in ALL)
    }


def _slug(board: object) -> str:
    return str(getattr(board, "uid")).removeprefix("paceline-")  # noqa: B009
