"""Worlds that came with a job, in sealed processes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from paceline.config.packages import PackageSettings
from paceline.errors import DeadlineError, PacelineError
from paceline.isolation.code.archive import pack
from paceline.isolation.code.folders import CodeFolder, CodeFolders
from paceline.isolation.code.packages import Packages
from paceline.isolation.code.sealed import sandbox_for
from paceline.isolation.code.world_process import MODULE, WorldError, WorldProcess
from paceline.isolation.sandbox import landlock
from paceline.platform.telemetry.metrics import Metrics
from paceline.plugins import Message
from paceline.types import Task
from paceline_environment.episodes.calls import EnvironmentCalls
from paceline_environment.stages import Stages
from paceline_environment.worlds.processes import EPISODES_PER_PROCESS, STUCK_S, JobProcesses
from paceline_environment.worlds.remote import RemoteWorld
from paceline_environment.worlds.worlds import JobWorlds
from paceline_harness.patience import PATIENCE_S
from paceline_harness.processes import sealed_processes, warm_process

pytestmark = pytest.mark.skipif(landlock.abi() < 6, reason="needs Landlock with scopes")

WORLD = '''
import asyncio, json, os, struct, threading, time
from paceline.plugins import EnvironmentPlugin, Message, Observation, StepResult


class Echo:
    """Counts its steps; some actions are deeds."""

    replayable = True

    def __init__(self, *, start=0, replayable=True):
        self.count = start
        self.replayable = replayable

    async def reset(self, task, seed):
        await asyncio.sleep(0)
        word = json.loads(task.payload)["word"]
        tool = {"type": "function", "function": {"name": "f"}}
        return Observation(messages=(Message("user", word),), text=word, tools=(tool,))

    def step(self, action):
        self.count += 1
        deed = action
        if deed == "block":
            time.sleep(3600)
        elif deed == "loop":
            while True:
                pass
        elif deed == "raise":
            raise RuntimeError("a bug in the world")
        elif deed == "exit":
            os._exit(7)
        elif deed == "memory":
            bytearray(64 << 30)
        elif deed == "fork":
            os.fork()
        elif deed == "nan":
            return "", float("nan"), False
        elif deed == "wrong":
            return 5
        elif deed in ("flood", "lie"):
            body = b'{"$id": 10000}' if deed == "flood" else b'["' + b"x" * 100 + b'"]'
            frame = struct.pack(">I", len(body)) + body
            for fd in range(3, 64):
                try:
                    os.write(fd, frame)
                except OSError:
                    pass
        elif deed == "tool":
            call = {"type": "function", "function": {"name": "f", "arguments": {"x": [1]}}}
            asked = Message("assistant", "", tool_calls=(call,))
            answer = Message("tool", "3", name="f", tool_call_id="id7")
            return Observation(messages=(asked, answer)), 0.0, False
        elif deed == "print":
            print("x" * (1 << 21))
        elif deed.startswith("sleep"):
            time.sleep(float(deed[5:]))
        return f"{action} {self.count} {os.getpid()}", 0.5, deed == "end"


ENVIRONMENT = EnvironmentPlugin(tasks="world:Echo", world="world:Echo")
NOTHING = 5
'''
TASK = Task("t", "world:ENVIRONMENT", json.dumps({"word": "hello"}))
Make = Callable[..., Awaitable[RemoteWorld]]


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[JobProcesses]:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "world.py").write_text(WORLD)
    for each in (folder, *folder.parents):  # the sandbox may run as another user
        if each.owner() == "root":
            each.chmod(each.stat().st_mode | 0o5)
    sandbox = sandbox_for(MODULE)

    async def where() -> CodeFolder:
        return CodeFolder(folder)

    async def start(code: CodeFolder, threads: int) -> WorldProcess:
        return await WorldProcess.start(
            sandbox, code, made.target, threads=threads, memory_bytes=1 << 30
        )

    made = JobProcesses(start=start, folder=where, target="world:ENVIRONMENT")
    sweeping = asyncio.create_task(sweep(made))
    yield made
    sweeping.cancel()
    await made.close()
    await sandbox.close()


async def sweep(processes: JobProcesses) -> None:
    while True:
        await asyncio.sleep(0.1)
        await processes.sweep()


@pytest.fixture
def make(processes: JobProcesses) -> Make:
    async def made(**options: Any) -> RemoteWorld:
        world = RemoteWorld(processes, options)
        observation = await world.reset(TASK, 0)
        assert (observation.text, observation.messages[0].content) == ("hello", "hello")
        assert observation.tools == ({"type": "function", "function": {"name": "f"}},)
        return world

    return made


async def test_a_world_of_the_job_is_an_environment(make: Make) -> None:
    world = await make(start=10)
    assert world.replayable
    first, last = await world.step("a"), await world.step("end")
    assert first.observation.text.startswith("a 11 ")
    assert (first.reward, first.done, last.done) == (0.5, False, True)
    await world.close()


async def test_calls_of_tools_and_answers_keep_all_that_they_have(make: Make) -> None:
    world = await make()
    asked, message = (await world.step("tool")).observation.messages
    function = {"name": "f", "arguments": {"x": [1]}}
    assert asked.tool_calls == ({"type": "function", "function": function},)
    assert message == Message("tool", "3", name="f", tool_call_id="id7")
    await world.close()


@pytest.mark.parametrize(
    ("deed", "told"),
    [
        ("raise", r"environment: RuntimeError: a bug in the world \(world.py:\d+\)"),
        ("nan", "environment: step returned the reward nan, no finite number"),
        ("wrong", "environment: TypeError: a StepResult is due, or"),
        ("memory", "environment: MemoryError"),
        ("fork", r"environment: PermissionError: \[Errno 1\]"),
        ("exit", r"environment: the process of the job's environment: .*exit code 7"),
    ],
)
async def test_what_a_world_does_wrong_is_told_and_ends_its_episode_alone(
    make: Make, deed: str, told: str
) -> None:
    worlds = [await make() for _ in range(3)]
    for world in worlds:
        await world.step("before")
    with pytest.raises(WorldError, match=told):
        await worlds[1].step(deed)
    await worlds[1].close()
    for world in (worlds[0], worlds[2]):
        assert (await world.step("after")).observation.text.startswith("after 2 ")
        await world.close()


async def test_bystanders_of_an_end_are_moved_and_the_culprit_is_named(make: Make) -> None:
    """Those in a call are suspects too: they go on in processes of their own."""
    worlds = [await make() for _ in range(4)]
    for world in worlds:
        await world.step("before")
    waiting = [asyncio.create_task(world.step("sleep3")) for world in worlds[:3]]
    await asyncio.sleep(0.1)
    with pytest.raises(WorldError, match="exit code 7"):
        await worlds[3].step("exit")
    moved = [(await each).observation.text.split() for each in waiting]
    assert [each[:2] for each in moved] == [["sleep3", "2"]] * 3
    assert len({each[2] for each in moved}) == 3
    for world in worlds:
        await world.close()


async def test_a_world_that_cannot_be_replayed_is_lost_with_its_process(make: Make) -> None:
    worlds = [await make(replayable=False) for _ in range(2)]
    for world in worlds:
        await world.step("before")
    with pytest.raises(PacelineError, match="exit code 7"):
        await worlds[0].step("exit")
    with pytest.raises(PacelineError, match="exit code 7"):
        await worlds[1].step("after")
    for world in worlds:
        await world.close()


@pytest.mark.parametrize("deed", ["block", "loop"])
async def test_one_that_never_returns_holds_up_no_other(
    make: Make, processes: JobProcesses, deed: str
) -> None:
    worlds = [await make() for _ in range(8)]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await worlds[0].step(deed)
    await worlds[0].close()
    deadline = time.monotonic() + max(STUCK_S.values())
    count = 0
    while time.monotonic() < deadline and count < 40:
        results = await asyncio.gather(*(world.step("go") for world in worlds[1:]))
        count += 1
        assert [each.observation.text.split()[1] for each in results] == [str(count)] * 7
        await asyncio.sleep(0.2)
    new = await make()
    stuck, fresh = await worlds[1].step("pid"), await new.step("pid")
    assert stuck.observation.text.split()[2] == fresh.observation.text.split()[2]
    for world in (*worlds[1:], new):
        await world.close()


@pytest.mark.parametrize(
    ("deed", "told"), [("flood", "answered to 10000, which nobody"), ("lie", "not an object")]
)
async def test_a_process_that_sends_what_nobody_asked_for_is_ended(
    make: Make, deed: str, told: str
) -> None:
    world = await make()
    with pytest.raises(WorldError, match=told):
        await world.step(deed)
    await world.close()


async def test_what_is_printed_reaches_nobody_and_ends_nothing(make: Make) -> None:
    world = await make()
    assert (await world.step("print")).observation.text.startswith("print 1 ")
    await world.close()


async def test_a_call_that_was_cut_off_but_ends_costs_nobody_anything(
    make: Make, processes: JobProcesses
) -> None:
    """An aborted lease is no sign of a stuck world."""
    worlds = [await make() for _ in range(2)]
    before = (await worlds[1].step("a")).observation.text.split()[2]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await worlds[0].step("sleep0.3")
    await worlds[0].close()
    await asyncio.sleep(STUCK_S[True] + 0.5)
    assert (await worlds[1].step("b")).observation.text.split()[2] == before
    new = await make()
    assert (await new.step("c")).observation.text.split()[2] == before
    for world in (worlds[1], new):
        await world.close()


async def test_the_end_of_the_warm_process_is_told_at_once(
    make: Make, processes: JobProcesses
) -> None:
    """All worlds end with it; they are built anew from another."""
    world = await make()
    await world.step("before")
    waiting = asyncio.create_task(world.step("sleep3"))
    await asyncio.sleep(0.1)
    warm_process().kill()
    moved = await asyncio.wait_for(waiting, PATIENCE_S)
    assert moved.observation.text.startswith("sleep3 2 ")
    await world.close()


async def test_many_episodes_share_few_processes(make: Make, processes: JobProcesses) -> None:
    worlds = [await make() for _ in range(EPISODES_PER_PROCESS * 2 + 1)]
    assert processes.num_processes == 3
    for world in worlds:
        await world.close()


async def test_a_target_that_is_no_environment(processes: JobProcesses) -> None:
    for target, told in (
        ("world:NOTHING", "world:NOTHING is a int, no EnvironmentPlugin"),
        ("world:MISSING", "has no attribute 'MISSING'"),
        ("nowhere:X", "No module named 'nowhere'"),
    ):
        processes.target = target
        world = RemoteWorld(processes, {})
        with pytest.raises(PacelineError, match=told):
            await world.reset(TASK, 0)
        await world.close()
        assert processes.num_processes == 0


async def test_a_job_whose_turn_it_is_gets_a_process_of_the_one_with_most(
    tmp_path: Path,
) -> None:
    """The episodes in it are moved and go on where they were."""
    (tmp_path / "world.py").write_text(WORLD)
    archive = BytesIO()
    code = pack(tmp_path, archive)

    async def fetch(digest: str, into: BinaryIO) -> None:
        into.write(archive.getvalue())

    folders = CodeFolders(fetch, packages=Packages(PackageSettings()))
    sandbox = sandbox_for(MODULE)
    worlds = JobWorlds(sandbox=sandbox, folders=folders, memory_bytes=1 << 30, max_processes=2)
    first, second = (worlds.of(job, code=code, target="world:ENVIRONMENT") for job in "ab")
    many = [first() for _ in range(EPISODES_PER_PROCESS + 1)]
    for world in many:
        await world.reset(TASK, 0)
        await world.step("before")
    other = second()
    async with asyncio.timeout(PATIENCE_S):
        await other.reset(TASK, 0)
    after = [(await world.step("after")).observation.text.split() for world in many]
    assert {each[1] for each in after} == {"2"}
    assert len({each[2] for each in after}) == 1
    await worlds.end("a")
    with pytest.raises(PacelineError, match="its job is over"):
        await many[0].step("late")
    assert (await other.step("x")).observation.text.startswith("x 1 ")
    for world in (*many, other):
        await world.close()
    await worlds.close()
    await sandbox.close()
    await folders.close()


SLOW = (
    """
import json, time
from pathlib import Path

time.sleep(json.loads(Path(__file__).with_name("seconds.json").read_text()))
"""
    + WORLD
)


@pytest.fixture
async def slow(tmp_path: Path) -> AsyncIterator[Callable[..., JobProcesses]]:
    """Processes of a world that takes some seconds to load, and may take `load_s`."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "world.py").write_text(SLOW)
    for each in (folder, *folder.parents):
        if each.owner() == "root":
            each.chmod(each.stat().st_mode | 0o5)
    sandbox = sandbox_for(MODULE)
    made: list[JobProcesses] = []

    async def where() -> CodeFolder:
        return CodeFolder(folder)

    async def start(code: CodeFolder, threads: int) -> WorldProcess:
        target, memory_bytes = "world:ENVIRONMENT", 1 << 30
        return await WorldProcess.start(
            sandbox, code, target, threads=threads, memory_bytes=memory_bytes
        )

    def make(*, takes_s: float, load_s: float) -> JobProcesses:
        (folder / "seconds.json").write_text(json.dumps(takes_s))
        made.append(
            JobProcesses(start=start, folder=where, target="world:ENVIRONMENT", load_s=load_s)
        )
        return made[-1]

    yield make
    for each in made:
        await each.close()
    await sandbox.close()


class Timed:
    """Calls of worlds with a limit, as episodes make them."""

    def __init__(self, limit_s: float) -> None:
        self.stages = Stages()
        self._limit_s = limit_s
        self._calls = EnvironmentCalls(metrics=Metrics())

    async def call(self, world: RemoteWorld, work: Awaitable[Any]) -> Any:
        task: Any = asyncio.current_task()
        stages = self.stages.of("job")
        with self._calls.of(self._limit_s, task, world, stages=stages).begin("call"):
            return await work

    async def sweep(self) -> None:
        while True:
            await asyncio.sleep(0.02)
            self._calls.sweep()


async def test_loading_has_a_limit_of_its_own_and_does_not_count_as_a_step(
    slow: Callable[..., JobProcesses],
) -> None:
    processes, timed = slow(takes_s=4.0, load_s=30.0), Timed(limit_s=3.0)
    sweeping = asyncio.create_task(timed.sweep())
    worlds = [RemoteWorld(processes, {}) for _ in range(5)]
    resets = asyncio.gather(*(timed.call(each, each.reset(TASK, 0)) for each in worlds))
    while timed.stages.waiting["load"] < 5:
        await asyncio.sleep(0.01)
    assert timed.stages.waiting["step"] == 0  # none of which would look stuck
    assert [each.text for each in await resets] == ["hello"] * 5
    assert processes.num_processes == 1
    assert sum(timed.stages.waiting.values()) == 0
    with pytest.raises(DeadlineError, match="more than 3 s"):  # the limit of steps is as before
        await timed.call(worlds[0], worlds[0].step("sleep 9"))
    sweeping.cancel()


async def test_what_does_not_load_in_time_is_ended_and_named(
    slow: Callable[..., JobProcesses],
) -> None:
    processes = slow(takes_s=60.0, load_s=0.5)
    worlds = [RemoteWorld(processes, {}) for _ in range(3)]
    resets = [each.reset(TASK, 0) for each in worlds]
    for each in await asyncio.gather(*resets, return_exceptions=True):
        assert isinstance(each, WorldError)
        assert "did not load within 0.5 s (tasks.load_timeout_s)" in each.message
    await asyncio.gather(*(each.close() for each in worlds))
    assert processes.num_processes == 0


async def test_a_process_that_ends_while_it_loads_is_no_fault_of_an_episode(
    slow: Callable[..., JobProcesses],
) -> None:
    processes = slow(takes_s=60.0, load_s=30.0)
    worlds = [RemoteWorld(processes, {}) for _ in range(3)]
    resets = [asyncio.create_task(each.reset(TASK, 0)) for each in worlds]
    while not all(each.is_loading for each in worlds):
        await asyncio.sleep(0.01)
    for each in sealed_processes():
        each.kill()
    for reset in resets:
        with pytest.raises(WorldError, match="while it was loaded"):
            await reset
    await asyncio.gather(*(each.close() for each in worlds))
    assert processes.num_processes == 0
