"""Programs with a folder to write in and further processes, and what bounds both."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.errors import UnavailableError
from paceline.isolation.sandbox import landlock
from paceline.isolation.sandbox.sandbox import Sandbox
from paceline.plugins import ProgramEnding, ProgramLimits
from paceline_harness.patience import PATIENCE_S
from paceline_harness.processes import warm_process

pytestmark = pytest.mark.skipif(not landlock.abi(), reason="this kernel has no Landlock")


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    made = Sandbox()
    if (level := await made.level()).number < 3:
        pytest.skip(f"level 3 does not hold here: {level.why}")
    yield made
    await made.close()


async def run(sandbox: Sandbox, source: str, **limits: Any) -> str:
    """What a program has written; it must have ended by itself."""
    chosen: dict[str, Any] = {"time_s": 20.0, "scratch_bytes": 1 << 20, "processes": 8, **limits}
    outcome = await sandbox.run(source, stdin=b"", limits=ProgramLimits(**chosen))
    assert outcome.ending is ProgramEnding.EXITED, outcome
    return outcome.stdout.decode() or outcome.stderr.decode().splitlines()[-1]


async def test_it_writes_files_that_no_other_program_sees(sandbox: Sandbox) -> None:
    source = """
import os, shutil, sqlite3, tempfile
with tempfile.TemporaryDirectory() as folder:
    open(f"{folder}/a", "w").write("text")
    shutil.copy(f"{folder}/a", "b")
    os.rename("b", "c")
db = sqlite3.connect("numbers.db")
db.execute("create table t (n)"); db.execute("insert into t values (7)"); db.commit()
print(open("c").read(), db.execute("select n from t").fetchone(), *sorted(os.listdir(".")))
"""
    # Where Python is installed below /tmp, its folder is mounted there.
    beside = {Path(sys.prefix).parts[2]} if Path(sys.prefix).is_relative_to("/tmp") else set[str]()
    for _ in range(2):
        text, number, *names = (await run(sandbox, source)).split()
        assert (text, number, {*names} - beside) == ("text", "(7,)", {"c", "numbers.db"})
    assert not Path("/tmp/numbers.db").exists()


async def test_it_starts_programs(sandbox: Sandbox) -> None:
    source = """
import subprocess, sys
open("part.py", "w").write("print(6 * 7)")
print(subprocess.run([sys.executable, "part.py"], capture_output=True, text=True).stdout, end="")
print(subprocess.run("printf 1; exit 3", shell=True, capture_output=True).returncode)
"""
    assert await run(sandbox, source) == "42\n3\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "for n in range(9): open(f'{n}', 'wb').write(bytes(1 << 18))",
            "OSError: [Errno 28] No space left on device",
        ),
        (
            "for n in range(5000): open(f'{n}', 'w').close()",
            "OSError: [Errno 28] No space left on device",
        ),
        (
            "import os\nopen('x', 'w').write('#!/bin/sh\\n'); os.execv('x', ['x'])",
            "PermissionError: [Errno 13] Permission denied",
        ),
        (
            "import os, time\nfor n in range(100):\n    if not os.fork(): time.sleep(60)",
            "BlockingIOError: [Errno 11] Resource temporarily unavailable",
        ),
        ("open('/usr/lib/x', 'w')", "OSError: [Errno 30] Read-only file system: '/usr/lib/x'"),
        ("import os; os.stat('/home')", "FileNotFoundError: [Errno 2] No such file or directory"),
    ],
)  # fmt: skip
async def test_what_it_may_not(sandbox: Sandbox, source: str, expected: str) -> None:
    assert (await run(sandbox, source)).startswith(expected)
    assert await run(sandbox, "print(1)") == "1\n"


LEAVES_PROCESSES = """
import os, time
for _ in range(3):
    if not os.fork():
        os.setsid()
        if not os.fork():
            time.sleep(60)
        os._exit(0)
print("left", flush=True)
"""


async def test_its_processes_end_with_it(sandbox: Sandbox) -> None:
    assert await run(sandbox, LEAVES_PROCESSES) == "left\n"
    assert not descendants()


@pytest.mark.parametrize("killed", ["program", "sandbox"])
async def test_its_processes_end_when_it_is_killed(sandbox: Sandbox, killed: str) -> None:
    source = LEAVES_PROCESSES + "time.sleep(60)"
    running = asyncio.create_task(run(sandbox, source))
    async with asyncio.timeout(PATIENCE_S):
        while len(descendants()) < 6:  # who waits, init, the program, and what it has left
            await asyncio.sleep(0.01)
    before = descendants()
    if killed == "program":
        running.cancel()
    else:
        os.kill(warm_process().pid, signal.SIGKILL)
    await asyncio.gather(running, return_exceptions=True)
    _, alive = await asyncio.to_thread(psutil.wait_procs, before, timeout=PATIENCE_S)
    assert not alive


def descendants() -> list[psutil.Process]:
    """All below the warm process."""
    return warm_process().children(recursive=True)


@pytest.mark.parametrize(
    ("source", "ending"),
    [
        ("import ctypes; ctypes.string_at(0)", (ProgramEnding.KILLED, signal.SIGSEGV)),
        ("import os; os.abort()", (ProgramEnding.KILLED, signal.SIGABRT)),
        ("import sys; sys.exit(139)", (ProgramEnding.EXITED, 139)),
    ],
)
async def test_how_it_ends_is_told(
    sandbox: Sandbox, source: str, ending: tuple[ProgramEnding, int]
) -> None:
    limits = ProgramLimits(processes=1)
    outcome = await sandbox.run(source, stdin=b"", limits=limits)
    assert (outcome.ending, outcome.code) == ending


@pytest.mark.parametrize("needs", [{"processes": 1}, {"scratch_bytes": 1 << 20}])
async def test_level_2_refuses_what_it_cannot_hold(needs: dict[str, int]) -> None:
    made = Sandbox(highest=2)
    try:
        with pytest.raises(UnavailableError, match="level 3 is needed, here it is 2"):
            await made.run("print(1)", stdin=b"", limits=ProgramLimits(**needs))
    finally:
        await made.close()
