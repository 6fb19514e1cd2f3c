"""Exports trained trajectories as JSON lines to the run directory."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from paceline_experience.ledger.ledger import JobLedger
from paceline_experience.ledger.records import Exported
from paceline_experience.ledger.trajectories import ExportRange

_PAGE = 100
_STEP_FILE = re.compile(r"step-(\d+)")


class Exporter:
    """Writes each trained trajectory once, as long as the ledger still has it.

    Progress is stored with the job, so another replica writes none twice. Files appear atomically.
    A file that a store with lost writes does not know is removed: the next one has what is in it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writing = asyncio.Lock()

    async def export(self, ledger: JobLedger, *, name: str, before_step: int | None = None) -> int:
        """Write what was trained since the last export to `<name>.jsonl`, in order of training.

        Only steps below `before_step`; one call at a time. Returns how many were written.

        Raises:
            OSError: the file cannot be written; the next call includes its content.
        """
        async with self._writing:
            await self._recover(ledger)
            await asyncio.to_thread(_remove_unknown, self._folder, ledger.trajectories.exported)
            export = await ledger.trajectories.begin(name, before_step=before_step)
            if export is None:
                return 0
            num_written = await self._write(ledger, export)
            await ledger.trajectories.end(export, num_written=num_written)
            return num_written

    async def _recover(self, ledger: JobLedger) -> None:
        """An interrupted export is complete if its file exists: files appear atomically."""
        export = await ledger.trajectories.unfinished()
        if export is None or not self._path(export).exists():
            return
        num_lines = await asyncio.to_thread(_count, self._path(export))
        await ledger.trajectories.end(export, num_written=num_lines)

    async def _write(self, ledger: JobLedger, export: ExportRange) -> int:
        """Write the file; returns how many trajectories are in it."""
        path = self._path(export)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        await asyncio.to_thread(_create, draft)
        offset, num_written = export.after, 0
        while offset < export.until:
            page = await ledger.trajectories.between(offset, export.until, page_size=_PAGE)
            await asyncio.to_thread(_append, draft, page.found)
            offset, num_written = page.offset, num_written + len(page.found)
        await asyncio.to_thread(_publish, draft, path)
        return num_written

    def _path(self, export: ExportRange) -> Path:
        return self._folder / f"{export.name}.jsonl"


def _remove_unknown(folder: Path, exported: Exported) -> None:
    """Remove the files of later steps than those of the newest export that the ledger knows."""
    newest = _STEP_FILE.fullmatch(exported.newest)
    if newest is None and exported.offset >= 0:
        return
    known = int(newest[1]) if newest else -1
    for path in folder.glob("step-*.jsonl"):
        step = _STEP_FILE.fullmatch(path.stem)
        if step and int(step[1]) > known:
            path.unlink(missing_ok=True)


def _create(draft: Path) -> None:
    draft.parent.mkdir(parents=True, exist_ok=True)
    draft.write_text("")


def _append(draft: Path, trajectories: Iterable[Mapping[str, Any]]) -> None:
    with draft.open("ab") as file:
        for each in trajectories:
            completion = each["completion_text"] or each["response_text"]
            file.write(to_json({**each, "completion_text": completion}) + b"\n")


def _publish(draft: Path, path: Path) -> None:
    # A crash of the machine must not leave an empty file under the final name.
    with draft.open("a") as file:
        os.fsync(file.fileno())
    draft.replace(path)


def _count(path: Path) -> int:
    with path.open() as file:
        return sum(1 for _ in file)
