"""Worlds of installed environments in processes of a job, sealed and open; settings for them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import pytest

from paceline.config import parse_job
from paceline.config.packages import PackageSettings
from paceline.environments.arithmetic.tasks import ArithmeticTasks
from paceline.environments.gymnasium.tasks import GymnasiumTasks
from paceline.environments.reasoning_gym.tasks import ReasoningGymTasks
from paceline.errors import ConfigError, InvalidError
from paceline.isolation.code.folders import CodeFolder, CodeFolders
from paceline.isolation.code.packages import Packages
from paceline.isolation.code.sealed import sandbox_for
from paceline.isolation.code.world_process import MODULE, WorldError
from paceline.isolation.sandbox import landlock
from paceline.platform.fair_queue import NO_OWNER, QueueOwner
from paceline_environment.worlds.factories import check_settings, worlds_of
from paceline_environment.worlds.worlds import JobWorlds
from paceline_harness.patience import PATIENCE_S

sealed = pytest.mark.skipif(landlock.abi() < 6, reason="needs Landlock with scopes")
LAKE = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False, "desc": ["SFFG"]}}
OWN = """
import os, socket, time
import gymnasium
from paceline.plugins import EnvironmentPlugin


class Deeds(gymnasium.Env):
    observation_space = gymnasium.spaces.Text(100)
    action_space = gymnasium.spaces.Text(100)

    def reset(self, *, seed=None, options=None):
        return "do", {}

    def step(self, action):
        if action == "raise":
            raise RuntimeError("a bug of the environment")
        if action == "block":
            time.sleep(3600)
        if action == "connect":
            socket.create_connection(("127.0.0.1", 9))
        if action == "write":
            open("/paceline-was-here", "w")
        return str(os.getpid()), 1.0, action == "end", False, {}


gymnasium.register("Deeds-v0", Deeds)
ENVIRONMENT = EnvironmentPlugin(
    tasks="paceline.environments.gymnasium.tasks:GymnasiumTasks",
    world="paceline.environments.gymnasium.world:GymnasiumWorld",
)
"""


def job(environment: str, **more: Any) -> Any:
    given = {
        "name": "j",
        "model": {"path": "models/arithmetic"},
        "tasks": {"environment": environment},
        "reward": [{"kind": "environment"}],
        **more,
    }
    return parse_job(given)


@pytest.fixture
async def worlds(tmp_path: Path) -> AsyncIterator[JobWorlds]:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "deeds.py").write_text(OWN)
    for each in (folder, *folder.parents):  # the sandbox may run as another user
        if each.owner() == "root":
            each.chmod(each.stat().st_mode | 0o5)

    class Here(CodeFolders):
        async def folder(self, digest: str, owner: QueueOwner = NO_OWNER) -> CodeFolder:
            del digest
            return CodeFolder(folder)

    async def fetch(digest: str, into: BinaryIO) -> None:
        raise AssertionError(digest)

    sandbox, folders = sandbox_for(MODULE), Here(fetch, packages=Packages(PackageSettings()))
    made = JobWorlds(sandbox=sandbox, folders=folders, memory_bytes=1 << 30, max_processes=64)
    sweeping = asyncio.create_task(made.sweep())
    yield made
    sweeping.cancel()
    await made.close()
    await sandbox.close()
    await folders.close()


def children() -> set[int]:
    return {each.pid for each in psutil.Process().children()}


@sealed
async def test_gymnasium_is_played_in_a_sealed_process(worlds: JobWorlds) -> None:
    make = worlds_of("job", job("gymnasium"), worlds, {})
    many = [make(**LAKE) for _ in range(8)]
    tasks = GymnasiumTasks(0, **LAKE)
    first = await asyncio.gather(*(each.reset(tasks[0], 0) for each in many))
    assert {each.text for each in first} == {"0\n\nActions: 0 to 3"}
    assert many[0].replayable
    for each in many:
        results = [await each.step("2") for _ in range(3)]
        assert [(result.reward, result.done) for result in results] == [(0, False)] * 2 + [
            (1, True)
        ]
        await each.close()


EVALUATING = [
    *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "puzzle24"),
    *("polynomial_multiplication", "simple_integration", "spiral_matrix", "string_insertion"),
]


@sealed
async def test_a_reply_that_is_evaluated_is_evaluated_in_a_sealed_process(
    worlds: JobWorlds, tmp_path: Path
) -> None:
    """Data sets of reasoning_gym evaluate replies as Python, and a job brings the weights."""
    pytest.importorskip("reasoning_gym")
    make = worlds_of("job", job("reasoning_gym"), worlds, {})
    deed = tmp_path / "deed"
    call = f"__import__('os').system('touch {deed}')"
    for name in EVALUATING:
        for reply in (call, f"[{call}]"):
            world = make(dataset=name, extract="whole")
            await world.reset(ReasoningGymTasks(0, dataset=name, size=4)[0], 0)
            with suppress(WorldError):  # of what cannot be evaluated
                assert (await world.step(reply)).done
            await world.close()
            assert not deed.exists(), name
    world = make(dataset="chain_sum", extract="whole")
    task = ReasoningGymTasks(0, dataset="chain_sum", size=4)[0]
    await world.reset(task, 0)
    assert (await world.step(json.loads(task.payload)["answer"])).reward == 1.0
    await world.close()


@sealed
async def test_what_does_not_fit_is_the_fault_of_the_job_not_of_the_attempt(
    worlds: JobWorlds,
) -> None:
    world = worlds_of("job", job("gymnasium"), worlds, {})(**LAKE, actions=["left"])
    with pytest.raises(InvalidError, match="actions: 1 names for 4 actions"):
        await world.reset(GymnasiumTasks(0, **LAKE)[0], 0)
    await world.close()


@sealed
@pytest.mark.parametrize(
    ("deed", "told"),
    [
        ("raise", "RuntimeError: a bug of the environment"),
        ("connect", "PermissionError"),
        ("write", "(Permission|OS)Error"),
    ],
)
async def test_what_an_environment_raises_is_no_reward(
    worlds: JobWorlds, deed: str, told: str
) -> None:
    make = worlds.of("job", code="0", target="deeds:ENVIRONMENT")
    bad, good = make(id="Deeds-v0", size=9), make(id="Deeds-v0", size=9)
    task = GymnasiumTasks(0, id="FrozenLake-v1")[0]
    for world in (bad, good):
        assert (await world.reset(task, 0)).text.startswith("do\n\nActions: text of at most 100")
    with pytest.raises(WorldError, match=told):
        await bad.step(deed)
    assert (await good.step("end")).done
    await asyncio.gather(bad.close(), good.close())


@sealed
async def test_an_environment_that_blocks_holds_up_no_other(worlds: JobWorlds) -> None:
    make = worlds.of("job", code="0", target="deeds:ENVIRONMENT")
    bad, good = make(id="Deeds-v0"), make(id="Deeds-v0")
    task = GymnasiumTasks(0, id="FrozenLake-v1")[0]
    for world in (bad, good):
        await world.reset(task, 0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await bad.step("block")
    async with asyncio.timeout(PATIENCE_S):  # its process is ended, and it is built anew in another
        before = (await good.step("on")).observation.text
        while (await good.step("on")).observation.text == before:
            await asyncio.sleep(0.2)
    await asyncio.gather(bad.close(), good.close())


async def test_an_open_process_plays_and_is_replaced(worlds: JobWorlds) -> None:
    target = "paceline.environments.arithmetic:ENVIRONMENT"
    before = children()
    task = ArithmeticTasks(0)[0]
    world = worlds.installed("job", target=target, sealed=False)()
    await world.reset(task, 0)
    (process,) = children() - before
    os.kill(process, signal.SIGKILL)
    result = await world.step(str(json.loads(task.payload)["answer"]))
    assert (result.reward, result.done) == (1.0, True)
    (other,) = children() - before - {process}
    await world.close()
    await worlds.close()
    assert other not in children()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"openenv": {"allow": ["h:1"]}, "verifiers": {"allow": ["gsm8k"]}}, ""),
        ({"openenv": {"hosts": []}}, "options.worlds.openenv: hosts"),
        ({"arithmetic": {"a": 1}}, "options.worlds.arithmetic: this environment has no settings"),
        ({"nowhere": {}}, "options.worlds.nowhere: .* is not installed"),
    ],
)
def test_settings_of_an_operator(settings: dict[str, dict[str, Any]], told: str) -> None:
    if not told:
        check_settings(settings)
        return
    with pytest.raises(ConfigError, match=told):
        check_settings(settings)


def test_a_job_cannot_bring_settings(worlds: JobWorlds) -> None:
    make = worlds_of("job", job("openenv"), worlds, {"openenv": {"allow": ["h:80"]}})
    make(base_url="http://h")
    with pytest.raises(TypeError, match="settings"):
        make(base_url="http://other", settings={"allow": ["other"]})
