"""Lock files that are removed while others wait for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.isolation.code.file_locks import locked, remove_unused, try_lock, unlock
from paceline_harness.patience import PATIENCE_S

# Adds 1 to a number in a file, with a pause in which another holder of the lock would be seen.
COUNTS = """
import asyncio, sys
from pathlib import Path
from paceline.isolation.code import file_locks

file_locks._LOCKED_S = 0.001
lock, count = Path(sys.argv[1]), Path(sys.argv[2])

async def main():
    for _ in range(100):
        async with file_locks.locked(lock):
            value = int(count.read_text())
            await asyncio.sleep(0)
            count.write_text(str(value + 1))

asyncio.run(main())
"""


def test_only_one_holds_a_lock_although_each_removes_its_file(tmp_path: Path) -> None:
    lock, count = tmp_path / "x.lock", tmp_path / "count"
    count.write_text("0")
    workers = [subprocess.Popen([sys.executable, "-c", COUNTS, lock, count]) for _ in range(4)]
    assert [each.wait(PATIENCE_S) for each in workers] == [0] * 4
    assert count.read_text() == "400"
    assert not lock.exists()


async def test_a_file_that_is_in_use_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    async with locked(path):
        assert try_lock(path) is None
        assert not remove_unused(path)
    with pytest.raises(FileNotFoundError):
        try_lock(path)
    held = [try_lock(path, shared=True, create=True), try_lock(path, shared=True)]
    assert not remove_unused(path)
    for each in held:
        assert each is not None
        unlock(each)
    assert remove_unused(path)
    assert not path.exists()
