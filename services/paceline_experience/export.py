"""Trained trajectories as JSON lines in the run directory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.types import Trajectory
from paceline_experience.ledger import JobLedger

_PAGE = 100


class Exporter:
    """Writes what has been trained since the last export, as far as the ledger keeps it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._newest: tuple[str, int] | None = None
        self._writing = asyncio.Lock()

    async def export(self, ledger: JobLedger, *, name: str) -> int:
        """Write `<name>.jsonl`, oldest first; how many. One at a time, so that none comes twice."""
        async with self._writing:
            return await self._export(ledger, name)

    async def _export(self, ledger: JobLedger, name: str) -> int:
        found: list[Trajectory] = []
        token, more = "", True
        while more:
            page, token = await ledger.trajectories(
                purpose="train", page_size=_PAGE, page_token=token
            )
            num_new = _before(page, self._newest)
            found += page[:num_new]
            more = bool(token) and num_new == len(page)
        if found:
            self._newest = (found[0].episode_id, found[0].attempt)
            path = self._folder / f"{name}.jsonl"
            await asyncio.to_thread(_write, path, found[::-1])
        return len(found)


def _before(page: list[Trajectory], newest: tuple[str, int] | None) -> int:
    names = [(t.episode_id, t.attempt) for t in page]
    return names.index(newest) if newest in names else len(page)


def _write(path: Path, trajectories: Iterable[Trajectory]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for each in trajectories:
            file.write(json.dumps(each, default=_fields) + "\n")


def _fields(noun: Any) -> dict[str, Any]:
    return {name: getattr(noun, name) for name in noun.__dataclass_fields__}
