"""Rows of jobs on volumes: how their reading ends is told, and what is away is waited for."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from paceline.data import JobData, MissingDataError
from paceline.enums import JobState
from paceline.errors import InvalidError, UnavailableError
from paceline_experience.jobs.data import DataOfJobs, cache_folder
from paceline_experience.jobs.dry_run import DryRun
from paceline_experience.jobs.job_parts import JobParts
from paceline_harness.patience import PATIENCE_S

if TYPE_CHECKING:
    from paceline_experience.store.store import Store
    from paceline_harness.ledgers.site import Site, Sites
    from paceline_harness.ledgers.world import Worlds

GOOD = "".join(json.dumps({"question": f"q{n}", "answer": "a"}) + "\n" for n in range(50))


@pytest.fixture
async def site(sites: Sites, store: Store, tmp_path: Path) -> AsyncIterator[Site]:
    made = sites(store, tmp_path, retry_s=0.0, data_folders=(str(tmp_path),))
    yield made
    await made.ledgers.close()


@pytest.fixture
def data(site: Site) -> DataOfJobs:
    """What the ledgers of the site read rows with."""
    return site.code.data


def readers() -> list[psutil.Process]:
    """The processes that build an index for this one."""
    started = psutil.Process().children()
    return [each for each in started if "paceline.data.index_child" in each.cmdline()]


def rows_of(path: Path | str) -> dict[str, Any]:
    options = {"sources": [{"path": str(path)}], "split": "all"}
    return {"tasks": {"environment": "dataset", "options": options}, "eval": None}


async def test_a_volume_that_is_away_is_waited_for(
    site: Site, data: DataOfJobs, tmp_path: Path
) -> None:
    volume, away = tmp_path / "volume", tmp_path / "away"
    volume.mkdir()
    (volume / "rows.jsonl").write_text(GOOD)
    await site.submit(**rows_of(volume))
    await site.ledgers.close()
    volume.rename(away)
    for at in range(4):
        if at == 1:
            volume.mkdir()  # the mount point
        await site.ledgers.open_all()
        assert not site.ledgers.active
        assert (await site.status()).state is JobState.QUEUED
    volume.rmdir()
    away.rename(volume)
    await site.ledgers.open_all()
    assert site.ledgers.active


async def test_what_is_away_while_plug_ins_are_tried_is_no_fault_of_the_job(
    store: Store, worlds: Worlds, tmp_path: Path
) -> None:
    may_read = JobData(allowed=(str(tmp_path), "ftp://"), cache=str(tmp_path / "cache"))
    trial = DryRun(timeout_s=60, memory_bytes=1 << 30)
    nowhere = "ftp://127.0.0.1:1/rows.jsonl"
    try:
        for away, kind in ((str(tmp_path), MissingDataError), (nowhere, UnavailableError)):
            with pytest.raises(kind, match=r"tasks\.options\.sources\.0: "):
                await trial.check(worlds(store, **rows_of(away)).spec, may_read)
    finally:
        await trial.close()


async def test_who_submits_again_is_told_how_reading_has_ended(
    site: Site, data: DataOfJobs, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(GOOD)
    await site.submit(**rows_of(path))
    spec = site.ledgers.active[site.job_id].spec
    path.write_text(GOOD + "{}\n")

    async def submit() -> None:
        """Wait for less time than starting the process takes."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with suppress(UnavailableError):
                await data.of(JobParts(spec), wait_s=0.1)
                return
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)

    for _ in range(2):
        with pytest.raises(InvalidError, match="line 51: has none of the columns"):
            await submit()
    path.write_text(GOOD)
    await submit()


async def test_a_job_that_is_over_has_no_file_open(
    site: Site, data: DataOfJobs, tmp_path: Path
) -> None:
    """Its ledger stays in memory for whoever asks, without the files that its tasks were in."""
    before = opened()
    rows = tmp_path / "rows.jsonl"
    rows.write_text(GOOD)
    await site.submit(**rows_of(rows))
    held = opened() - before
    assert str(rows) in held
    site.ledgers.retire(site.job_id)
    gc.collect()
    assert site.ledgers.peek(site.job_id) is not None
    assert held & opened() == set()


def opened() -> set[str]:
    """The files that this process has open or mapped."""
    fds = [Path(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")]
    mapped = [
        line.split(maxsplit=5)[5]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "/" in line
    ]
    found = {os.readlink(each) for each in fds if each.is_symlink()}
    return {each for each in (*found, *mapped) if each.startswith("/")}


async def test_closing_gives_up_what_is_being_read(
    site: Site, data: DataOfJobs, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(GOOD)
    await site.submit(**rows_of(path))
    spec = site.ledgers.active[site.job_id].spec
    path.write_text(GOOD * 2000)
    with pytest.raises(UnavailableError, match="still being read"):
        await data.of(JobParts(spec), wait_s=0.05)
    while not (found := readers()):
        await asyncio.sleep(0.01)
    (reader,) = found
    reader.suspend()  # so that it does not end by itself
    await asyncio.wait_for(data.close(), PATIENCE_S)
    children = subprocess.run(["ps", "-o", "args", "--ppid", str(os.getpid())], capture_output=True)
    assert b"index_child" not in children.stdout


def test_indexes_of_a_process_that_was_killed_are_deleted() -> None:
    code = (
        "import time; from paceline_experience.jobs.data import cache_folder; "
        "made = cache_folder(); print(made[0], flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        folder = Path(other.stdout.readline().decode().strip())
        mine, lock = cache_folder()
        assert folder.is_dir()
        other.send_signal(signal.SIGKILL)
    again, last = cache_folder()
    assert not folder.exists()
    assert mine.is_dir()
    for each in (lock, last):
        each.close()
    cache_folder()[1].close()
    assert not mine.exists()
    assert not again.exists()
