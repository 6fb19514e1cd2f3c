"""Programs in the sandbox, judged by what they write and how they end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from paceline.errors import UnavailableError
from paceline.isolation.sandbox import landlock
from paceline.isolation.sandbox.sandbox import Sandbox
from paceline.isolation.sandbox.zygote import MAX_THREADS
from paceline.plugins import ProgramEnding, ProgramLimits, ProgramOutcome
from paceline_harness.patience import PATIENCE_S
from paceline_harness.processes import warm_process

pytestmark = [
    pytest.mark.skipif(not landlock.abi(), reason="this kernel has no Landlock"),
    pytest.mark.asyncio(loop_scope="module"),
]
LIMITS = ProgramLimits(time_s=20.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[2, 3])
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    made = Sandbox(highest=request.param)
    if (level := await made.level()).number < request.param:
        pytest.skip(f"level {request.param} does not hold here: {level.why}")
    yield made
    await made.close()


async def run(sandbox: Sandbox, source: str, **limits: Any) -> ProgramOutcome:
    chosen: dict[str, Any] = {"time_s": 20.0, **limits}
    return await sandbox.run(source, stdin=b"1 2\n3\n", limits=ProgramLimits(**chosen))


@pytest.mark.parametrize(
    ("source", "stdout", "code"),
    [
        ("print(sum(map(int, input().split())), input())", "3 3\n", 0),
        ("import sys; print(sys.stdin.read().count('\\n'))", "2\n", 0),
        ("import sys; sys.exit(3)", "", 3),
        ("import sys; sys.exit('no')", "", 1),
        ("print('before'); 1 / 0", "before\n", 1),
        ("def", "", 1),
        ("print('\\u00e9')", "\u00e9\n", 0),
        ("import os; os.write(1, b'raw'); os._exit(0)", "raw", 0),
        ("if __name__ == '__main__': print('main')", "main\n", 0),
        ("print(open(0).read().split())", "['1', '2', '3']\n", 0),
        ("import atexit; atexit.register(print, 'end')", "end\n", 0),
        (
            "import sys, threading, io\nthreading.stack_size(1 << 26)\n"
            "threading.Thread(target=lambda: print(input())).start()",
            "1 2\n",
            0,
        ),
        ("import sys, io; print(1); sys.stdout = io.StringIO(); print(2)", "1\n", 0),
        (
            "import asyncio, threading, decimal, json, sqlite3, zoneinfo, tempfile, unittest\n"
            "from concurrent.futures import ThreadPoolExecutor as Pool\n"
            "async def f():\n    await asyncio.sleep(0)\n    return 2\n"
            "with Pool(2) as pool: print(asyncio.run(f()), *pool.map(abs, [-1]))\n"
            "print(sqlite3.connect(':memory:').execute('select 3').fetchone())",
            "2 1\n(3,)\n",
            0,
        ),
    ],
)
async def test_honest_programs_run(sandbox: Sandbox, source: str, stdout: str, code: int) -> None:
    outcome = await run(sandbox, source)
    assert (outcome.stdout.decode(), outcome.code) == (stdout, code), outcome.stderr
    assert outcome.ending is ProgramEnding.EXITED


@pytest.mark.parametrize(
    ("source", "limits", "ending"),
    [
        ("while True: pass", {"time_s": 0.5}, ProgramEnding.TIMEOUT),
        ("while True: pass", {"cpu_s": 1}, ProgramEnding.KILLED),
        (
            "import signal, time\n"
            "for n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
            "    except (OSError, ValueError): pass\n"
            "while True: pass",
            {"cpu_s": 1},
            ProgramEnding.KILLED,
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", {"time_s": 0.5}, "timeout"),
        ("import os\nfor n in range(64):\n    try: os.close(n)\n    except OSError: pass\n"
         "while True: pass", {"time_s": 0.5}, ProgramEnding.TIMEOUT),
        ("while True: print('x' * 1000)", {}, ProgramEnding.OUTPUT),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", {"time_s": 0.5}, "timeout"),
        ("import ctypes; ctypes.string_at(0)", {}, ProgramEnding.KILLED),
        ("import sys; sys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()", {"time_s": 2.0}, None),
        ("x = bytearray(10 ** 9)", {}, ProgramEnding.EXITED),
        ("import mmap; x = mmap.mmap(-1, 10 ** 9); x[:] = b'x' * 10 ** 9", {}, "exited"),
        ("import threading, time\n"
         "for _ in range(1500): threading.Thread(target=time.sleep, args=(99,)).start()",
         {"time_s": 2.0}, None),
    ],
)  # fmt: skip
async def test_what_uses_too_much_is_ended(
    sandbox: Sandbox, source: str, limits: dict[str, Any], ending: str | None
) -> None:
    started = time.monotonic()
    outcome = await run(sandbox, source, **limits)
    assert time.monotonic() - started < 60.0  # else nothing ends it
    assert ending in (None, outcome.ending), outcome
    assert outcome.ending is not ProgramEnding.EXITED or outcome.code != 0
    assert len(outcome.stdout) <= LIMITS.output_bytes + 1
    assert not warm_process().children()
    assert (await run(sandbox, "print(1)")).stdout == b"1\n"


async def test_a_program_opens_no_more_files_than_it_may(sandbox: Sandbox) -> None:
    source = "opened = []\nwhile True: opened.append(open('/dev/null'))"
    outcome = await run(sandbox, source, open_files=32)
    assert b"Too many open files" in outcome.stderr


async def test_many_at_once(sandbox: Sandbox) -> None:
    slots = asyncio.Semaphore(4)

    async def one(number: int) -> bytes:
        async with slots:
            return (await run(sandbox, f"print({number})")).stdout

    found = await asyncio.gather(*(one(number) for number in range(200)))
    assert found == [f"{number}\n".encode() for number in range(200)]
    assert not warm_process().children()
    assert len(psutil.Process().open_files()) < 100


async def test_a_cancelled_run_is_killed(sandbox: Sandbox) -> None:
    await run(sandbox, "print(1)")
    running = asyncio.create_task(run(sandbox, "while True: pass"))
    while not warm_process().children():
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    async with asyncio.timeout(PATIENCE_S):
        while warm_process().children():
            await asyncio.sleep(0.01)


async def test_forks_that_are_given_up_confuse_no_other(sandbox: Sandbox) -> None:
    await run(sandbox, "print(1)")

    async def given_up(number: int) -> None:
        running = asyncio.create_task(run(sandbox, f"print('given up {number}')"))
        for _ in range(number % 4):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    async def wanted(number: int) -> bytes:
        return (await run(sandbox, f"print({number})")).stdout

    for _ in range(8):
        giving_up = [given_up(number) for number in range(6)]
        found = await asyncio.gather(*(wanted(number) for number in range(3)), *giving_up)
        assert found[:3] == [b"0\n", b"1\n", b"2\n"]
    async with asyncio.timeout(PATIENCE_S):
        while warm_process().children():
            await asyncio.sleep(0.01)
    before = psutil.Process().num_fds()
    await asyncio.gather(*(given_up(number) for number in range(20)))
    await run(sandbox, "print(1)")
    # Other threads open a few meanwhile; each start that leaked would leave one.
    assert psutil.Process().num_fds() < before + 15


async def test_what_cannot_be_started_is_no_fault_of_the_program(sandbox: Sandbox) -> None:
    with pytest.raises(UnavailableError, match="no program could be started: MemoryError"):
        await run(sandbox, "# no room for the seals and such a text\n" * 100_000, memory_bytes=1)


async def test_a_killed_warm_process_takes_its_programs_along_and_is_replaced(
    sandbox: Sandbox,
) -> None:
    await run(sandbox, "print(1)")
    first = warm_process()
    running = asyncio.create_task(run(sandbox, "while True: pass"))
    while not (children := first.children()):
        await asyncio.sleep(0.01)
    os.kill(first.pid, signal.SIGKILL)
    with pytest.raises(UnavailableError, match="its process has ended"):
        await asyncio.wait_for(running, PATIENCE_S)
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, timeout=PATIENCE_S)
    assert not alive
    assert (await run(sandbox, "print(2)")).stdout == b"2\n"


async def test_doctor_tries_it(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "paceline.front.cli", "doctor")
    doctor = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},  # others have runs of their own
    )
    written, _ = await doctor.communicate()
    assert doctor.returncode == 0
    assert b"sandbox: level " in written


async def test_it_is_quick(sandbox: Sandbox) -> None:
    """Quicker than a new process that imports as much, also on a machine that has other work."""
    await run(sandbox, "print(1)")
    forked, new = list[float](), list[float]()
    for _ in range(10):
        forked.append((await run(sandbox, "print(1)")).seconds)
        since = time.monotonic()
        subprocess.run(
            [sys.executable, "-c", "import paceline.isolation.sandbox.zygote"], check=True
        )
        new.append(time.monotonic() - since)
    assert min(forked) < min(new)


CROWD = """
import threading, time
threading.stack_size(32768)
for _ in range({count}):
    threading.Thread(target=time.sleep, args=(2,), daemon=True).start()
print("all", flush=True)
time.sleep(2)
"""


async def test_a_program_with_too_many_threads_ends(sandbox: Sandbox) -> None:
    """Killed at level 2; at level 3 it cannot start them."""
    few = await run(sandbox, CROWD.format(count=100), memory_bytes=1 << 30)
    assert (few.ending, few.stdout) == (ProgramEnding.EXITED, b"all\n")
    many = await run(sandbox, CROWD.format(count=MAX_THREADS + 50), memory_bytes=1 << 30)
    is_killed = (many.ending, many.code) == (ProgramEnding.KILLED, signal.SIGKILL)
    assert is_killed or b"can't start new thread" in many.stderr
