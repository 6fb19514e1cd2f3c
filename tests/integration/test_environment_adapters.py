"""Adapters against what they adapt: a real OpenEnv server, and the library verifiers.

`make test-adapters` installs both and runs this.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from paceline.config.packages import PackageSettings
from paceline.errors import InvalidError
from paceline.isolation.code.folders import CodeFolder, CodeFolders
from paceline.isolation.code.packages import Packages
from paceline.isolation.code.sealed import sandbox_for
from paceline.isolation.code.world_process import MODULE, WorldError
from paceline.platform.fair_queue import NO_OWNER, QueueOwner
from paceline.plugins import Environment, Observation, StepResult
from paceline.testing import environments
from paceline.types import Task
from paceline_environment.worlds.worlds import JobWorlds
from paceline_harness.patience import PATIENCE_S

pytestmark = [pytest.mark.adapters, pytest.mark.timeout(300)]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
START_S = PATIENCE_S
CASES = """
import verifiers as vf
from datasets import Dataset

ROWS = Dataset.from_list([{"question": f"say {n}", "answer": str(n)} for n in range(3)])


class Patience(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": f"again, {len(state['trajectory'])}"}]

    @vf.stop
    async def is_right(self, state):
        last = state["trajectory"][-1]["completion"][-1] if state["trajectory"] else None
        return last is not None and last["content"] == state["answer"]


def said(completion, answer):
    return float(completion[-1]["content"] == answer)


def broken(completion):
    raise RuntimeError("the judge is away")


def together(completions):
    return [0.0 for _ in completions]


def add(a: int, b: int) -> str:
    \"\"\"Add two numbers.\"\"\"
    return str(a + b)


def load_environment(kind="single", fail=False, group=False):
    funcs = [said] + [broken] * fail + [together] * group
    given = {"dataset": ROWS, "rubric": vf.Rubric(funcs=funcs), "system_prompt": "Be brief."}
    if kind == "tool":
        return vf.ToolEnv(tools=[add], max_turns=3, **given)
    return Patience(max_turns=3, **given) if kind == "multi" else vf.SingleTurnEnv(**given)
"""


@pytest.fixture(scope="module")
def openenv_server() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, str(EXAMPLES / "openenv" / "server.py"), "--sessions", "2"]
    process = subprocess.Popen([*command, "--port", address.rpartition(":")[2]])
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))).close()
                break
            except ConnectionRefusedError:
                assert process.poll() is None, "the server has ended"
                assert time.monotonic() < deadline, "the server does not answer"
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_S)


def guessing(address: str, **more: Any) -> dict[str, Any]:
    given = {"base_url": f"http://{address}", "field": "guess", "action": "integer"}
    return {**given, "prompt": "{hint}", "template": "{hint}", "replayable": True, **more}


def test_openenv_fulfils_the_contract(openenv_server: str) -> None:
    environments.fulfils_the_contract(
        "openenv",
        guessing(openenv_server),
        answer=lambda _: "7",
        reward=0.0,
        settings={"allow": [openenv_server]},
    )


async def test_openenv_sessions_are_episodes(openenv_server: str) -> None:
    from paceline.environments.openenv.tasks import OpenEnvTasks
    from paceline.environments.openenv.world import OpenEnvWorld

    options = guessing(openenv_server)
    task = OpenEnvTasks(0, **options)[0]

    async def search() -> float:
        world = OpenEnvWorld(settings={"allow": [openenv_server]}, **options)
        first = await world.reset(task, 0)
        assert first.text == "0+5="
        low, high, total = 0, 5, 0.0
        while low <= high:
            guess = (low + high) // 2
            result = await world.step(str(guess))
            total += result.reward
            if result.done:
                break
            low, high = (guess + 1, high) if "+" in result.observation.text else (low, guess - 1)
        await world.close()
        return total

    # Two sessions at a time: the others wait for one.
    assert await asyncio.gather(*(search() for _ in range(6))) == [1.0] * 6


async def test_openenv_tells_what_its_model_refuses(openenv_server: str) -> None:
    from paceline.environments.openenv.tasks import OpenEnvTasks
    from paceline.environments.openenv.world import OpenEnvWorld

    options = guessing(openenv_server, action="json")
    world = OpenEnvWorld(settings={"allow": [openenv_server]}, **options)
    await world.reset(OpenEnvTasks(0, **options)[0], 0)
    result = await world.step('{"guess": "high"}')
    assert "guess: Input should be a valid integer" in result.observation.text
    assert not result.done
    await world.close()


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The id of an installed environment."""
    folder = tmp_path_factory.mktemp("installed")
    (folder / "paceline_cases.py").write_text(CASES)
    sys.path.append(str(folder))
    yield "paceline-cases"
    sys.path.remove(str(folder))


@pytest.fixture
async def worlds() -> AsyncIterator[JobWorlds]:
    class Example(CodeFolders):
        async def folder(self, digest: str, owner: QueueOwner = NO_OWNER) -> CodeFolder:
            return CodeFolder(EXAMPLES / "verifiers" / digest)

    async def fetch(digest: str, into: BinaryIO) -> None:
        raise AssertionError(digest)

    sandbox, folders = sandbox_for(MODULE), Example(fetch, packages=Packages(PackageSettings()))
    made = JobWorlds(sandbox=sandbox, folders=folders, memory_bytes=4 << 30, max_processes=64)
    yield made
    await made.close()
    await sandbox.close()
    await folders.close()


def row(number: int, split: str = "train") -> Task:
    return Task("t", "verifiers", json.dumps({"split": split, "row": number}))


async def start(
    worlds: JobWorlds, case: str, *, at: int = 0, **args: Any
) -> tuple[Environment, Observation]:
    target = "paceline.environments.verifiers:ENVIRONMENT"
    make = worlds.installed("job", target=target, sealed=False)
    world = make(id=case, args=args, size=3, settings={"allow": [case], "allow_args": ["*"]})
    return world, await world.reset(row(at), 0)


def test_verifiers_fulfils_the_contract(cases: str) -> None:
    environments.fulfils_the_contract(
        "verifiers",
        {"id": cases, "size": 3, "replayable": True},
        answer=lambda task: str(json.loads(task.payload)["row"]),
        reward=1.0,
        settings={"allow": [cases]},
    )


async def test_verifiers_single_and_several_turns(worlds: JobWorlds, cases: str) -> None:
    single, first = await start(worlds, cases, at=2)
    assert [(each.role, each.content) for each in first.messages] == [
        ("system", "Be brief."),
        ("user", "say 2"),
    ]
    result = await single.step("2")
    assert (result.reward, result.done) == (1.0, True)
    await single.close()

    several, _ = await start(worlds, cases, kind="multi")
    results = [await several.step(each) for each in ("1", "2", "0")]
    assert [each.observation.text for each in results[:2]] == ["again, 1", "again, 2"]
    assert [(each.reward, each.done) for each in results] == [(0, False), (0, False), (1, True)]
    await several.close()


async def test_verifiers_tools_are_offered_and_called(worlds: JobWorlds, cases: str) -> None:
    world, first = await start(worlds, cases, kind="tool")
    (tool,) = first.tools
    assert tool["function"]["name"] == "add"
    assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    results: list[StepResult] = [await world.step(each) for each in (call, "<tool_call>{", "0")]
    assert [(each.role, each.content) for each in results[0].observation.messages] == [
        ("tool", "5")
    ]
    assert results[1].observation.messages[0].role == "tool"
    assert [(each.reward, each.done) for each in results] == [(0, False), (0, False), (1, True)]
    await world.close()


async def test_what_fails_in_verifiers_is_no_reward(worlds: JobWorlds, cases: str) -> None:
    world, _ = await start(worlds, cases, fail=True)
    with pytest.raises(WorldError, match="a reward function has failed: RuntimeError: the judge"):
        await world.step("0")
    await world.close()


@pytest.mark.parametrize(
    ("args", "at", "told"),
    [
        ({}, 3, "tasks.options.size: the data set has 3 rows"),
        ({"group": True}, 0, "compares the rollouts of a group"),
        ({"colour": 1}, 0, "'paceline-cases' cannot be loaded"),
    ],
)
async def test_what_does_not_fit_in_verifiers_is_told(
    worlds: JobWorlds, cases: str, args: dict[str, Any], at: int, told: str
) -> None:
    with pytest.raises(InvalidError, match=told):
        await start(worlds, cases, at=at, **args)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "id: 'antigravity' is not allowed here"),
        ({"allow": ["antigravity"]}, "args: 'key' is not allowed here"),
        ({"allow": ["antigravity"], "allow_args": ["key"]}, "args: 'url' is not allowed here"),
    ],
)
async def test_only_what_the_operator_allows_is_loaded(
    worlds: JobWorlds, settings: dict[str, Any], told: str
) -> None:
    target = "paceline.environments.verifiers:ENVIRONMENT"
    world = worlds.installed("job", target=target, sealed=False)(
        id="antigravity", size=1, args={"url": "x", "key": "y"}, settings=settings
    )
    with pytest.raises(InvalidError, match=told):
        await world.reset(row(0), 0)


async def test_an_environment_of_verifiers_comes_with_a_job(worlds: JobWorlds) -> None:
    make = worlds.of("job", code="task", target="sums:ENVIRONMENT")
    world = make(id="sums", size=500)
    first = await world.reset(row(0, "eval"), 0)
    left, right = first.text.rstrip("=").split("+")
    result = await world.step(str(int(left) + int(right)))
    assert result.reward > 1.0
    await world.close()


def test_the_descriptor_needs_no_library() -> None:
    code = (
        "import sys; sys.modules['verifiers'] = None\n"
        "from paceline.environments.verifiers import ENVIRONMENT; ENVIRONMENT.load_tasks()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
