"""A descriptor is closed once, by its owner: its number may be another thread's at once."""

from __future__ import annotations

import ast
import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from subprocess import PIPE
from typing import Self

import psutil
import pytest
import uvloop

from paceline.isolation.process import PlainProcess, open_command
from paceline.isolation.sandbox import landlock
from paceline.isolation.sandbox.pipes import ReadPipe, WritePipe
from paceline.isolation.sandbox.sandbox import Sandbox
from paceline.plugins import ProgramLimits
from paceline_harness.patience import PATIENCE_S
from paceline_harness.processes import warm_process

ROOT = Path(__file__).resolve().parents[5]
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
SLEEP = "import time; time.sleep(60)"
LIMITS = ProgramLimits(time_s=20.0)
sealed = pytest.mark.skipif(not landlock.abi(), reason="this kernel has no Landlock")
Once = Callable[[Sandbox], Awaitable[None]]


class Threads:
    """Threads that open files and see whether these stay their own until they close them."""

    def __init__(self) -> None:
        self.num_opened, self.num_lost = 0, 0
        self._counted = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._go_on) for _ in range(3)]

    def __enter__(self) -> Self:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for each in self._threads:
            each.join()

    def _go_on(self) -> None:
        own = os.stat(__file__)
        while not self._stop.is_set():
            fds = [os.open(__file__, os.O_RDONLY) for _ in range(4)]
            self._stop.wait(0.0003)
            lost = [fd for fd in fds if not _is(fd, own)]
            for fd in set(fds) - set(lost):  # others may be anybody's by now
                os.close(fd)
            with self._counted:
                self.num_opened += len(fds)
                self.num_lost += len(lost)


def _is(fd: int, file: os.stat_result) -> bool:
    try:
        found = os.fstat(fd)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (file.st_dev, file.st_ino)


async def killed(sandbox: Sandbox) -> None:
    process = await sandbox.start(SLEEP, readable=(), limits=LIMITS)
    await process.kill()
    await process.kill()


async def ended(sandbox: Sandbox) -> None:
    process = await sandbox.start("print(input())", readable=(), limits=LIMITS)
    process.write(b"there\n")
    answers = asyncio.StreamReader()
    process.receive(answers.feed_data, answers.feed_eof)
    assert await answers.read() == b"there\n"
    process.write(b"nobody reads this\n" * 10_000)
    await process.kill()


async def run(sandbox: Sandbox) -> None:
    assert (await sandbox.run("print(1)", limits=LIMITS)).stdout == b"1\n"


async def group(_: Sandbox) -> None:
    process = await PlainProcess.start(["cat"], stderr=PIPE)
    await process.kill()


async def beside(_: Sandbox) -> None:
    process = await PlainProcess.start(open_command("paceline.enums"))
    await process.kill()


@sealed
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("once", "times"),
    [(killed, 250), (ended, 10), (run, 10), (group, 10), (beside, 3)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_no_descriptor_of_another_thread_is_closed_and_none_stays_open(
    loop: str, once: Once, times: int
) -> None:
    async def stress() -> tuple[int, int, Threads]:
        sandbox = Sandbox()
        await killed(sandbox)
        await once(sandbox)
        before = psutil.Process().num_fds()
        with Threads() as threads:
            for _ in range(times):
                await once(sandbox)
        async with asyncio.timeout(PATIENCE_S):
            while (after := psutil.Process().num_fds()) > before:
                await asyncio.sleep(0.01)  # transports close in the next turns of the loop
        await sandbox.close()
        return before, after, threads

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        before, after, threads = runner.run(stress())
    assert after <= before
    assert threads.num_opened
    assert threads.num_lost == 0


@pytest.mark.parametrize("folder", ["shared", "services", "benchmarks"])
def test_no_loop_is_given_a_file_that_it_would_close_too(folder: str) -> None:
    """uvloop closes the descriptor of such a file twice; see `paceline.isolation.sandbox.pipes`."""
    calls = {"connect_read_pipe", "connect_write_pipe"}
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Attribute) or node.attr not in calls, path


@sealed
@pytest.mark.parametrize("loop", LOOPS)
def test_starts_that_are_given_up_leave_no_descriptor_and_no_child(loop: str) -> None:
    async def give_up() -> None:
        sandbox = Sandbox()
        await killed(sandbox)
        before = psutil.Process().num_fds()
        for number in range(60):
            starting = asyncio.create_task(killed(sandbox))
            for _ in range(number % 6):
                await asyncio.sleep(0)
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        await killed(sandbox)
        # Other threads open a few meanwhile; each start that leaked would leave one.
        assert psutil.Process().num_fds() < before + 15
        async with asyncio.timeout(PATIENCE_S):
            while warm_process().children():
                await asyncio.sleep(0.01)
        await sandbox.close()

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(give_up())


def pidfds() -> int:
    names = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return sum(each.is_symlink() and "pidfd" in os.readlink(each) for each in names)


@sealed
@pytest.mark.parametrize("loop", LOOPS)
def test_a_child_that_comes_as_its_start_is_given_up_is_killed_and_let_go(loop: str) -> None:
    async def give_up() -> None:
        sandbox = Sandbox()
        await killed(sandbox)
        before = pidfds()
        for _ in range(5):
            starting = asyncio.create_task(killed(sandbox))
            while pidfds() == before and not starting.done():
                await asyncio.sleep(0)
            starting.cancel()  # it has the child, and has not gone on yet
            await asyncio.gather(starting, return_exceptions=True)
            assert pidfds() == before
        await sandbox.close()

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(give_up())


@pytest.mark.parametrize("loop", LOOPS)
def test_pipes_wait_for_a_slow_reader_and_end_with_it(loop: str) -> None:
    """What is written arrives whole, over a pipe that is often full and a reader that pauses."""
    sent = os.urandom(1 << 20)

    async def exchange() -> bytes:
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        reader = asyncio.StreamReader(limit=1 << 10)
        source, sink = ReadPipe(read, reader.feed_data, reader.feed_eof), WritePipe(write)
        reader.set_transport(source)
        for start in range(0, len(sent), 100_000):
            sink.write(sent[start : start + 100_000])
        received = await reader.readexactly(len(sent))
        source.close()
        assert await reader.read() == b""
        sink.write(b"nobody reads this")  # and so it is closed
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(write)
        sink.close()
        return received

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        assert runner.run(exchange()) == sent
