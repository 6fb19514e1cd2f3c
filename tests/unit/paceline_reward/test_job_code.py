"""Reward functions that come with a job: sealed, and each job in children of its own."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.config.packages import PackageSettings
from paceline.enums import ScoreStatus
from paceline.isolation.code.folders import CodeFolder
from paceline.isolation.code.packages import Packages
from paceline.isolation.sandbox import landlock
from paceline.platform.fair_queue import FairQueue, QueueOwner
from paceline.plugins import RewardInput
from paceline.types import Score
from paceline_harness.packages.wheels import write_wheel
from paceline_harness.patience import PATIENCE_S
from paceline_reward.job_pools import JobPools
from paceline_reward.pool import ChildPool, plain_children
from paceline_reward.scorer import Scorer

MakeItem = Callable[..., RewardInput]
Scored = Callable[..., Any]
pytestmark = pytest.mark.skipif(landlock.abi() < 6, reason="needs Landlock with scopes")

LEAF = "def half(value): return value / 2\n"
SCORING = '''
import os, pathlib, socket, sys, time
from paceline.plugins import RewardInput
from paceline.types import Score

SEEN = []
WORDS = pathlib.Path(__file__).with_name("words.txt").read_text().split()


def word(item):
    """A number, with data from the folder."""
    return float(item.response in WORDS)


def half(item):
    """With a package that the job requires, which it cannot change."""
    import paceline_leaf

    try:
        pathlib.Path(paceline_leaf.__file__).write_text("")
    except OSError:
        return paceline_leaf.half(float(item.response))
    return -1.0


def count(item, *, bonus=0.0):
    """What this process has scored before."""
    SEEN.append(item.response)
    print("scored", item.response)
    return Score(reward=len(SEEN) + bonus, parts={})


def try_to(item):
    """1 if a deed outside succeeds, else 0."""
    deed, _, what = item.response.partition(" ")
    try:
        if deed == "read":
            open(what).read()
        elif deed == "write":
            open(what, "w").write("x")
        elif deed == "connect":
            socket.create_connection(("127.0.0.1", int(what)), 1)
        elif deed == "kill":
            os.kill(int(what), 9)
        elif deed == "fork":
            os.fork()
        elif deed == "environ":
            return float(any("SECRET" in name for name in os.environ))
        elif deed == "hang":
            time.sleep(3600)
        elif deed == "memory":
            bytearray(64 << 30)
        elif deed == "exit":
            os._exit(0)
        elif deed == "loop":
            while True:
                pass
    except (OSError, MemoryError):
        return 0.0
    return 1.0
'''


@pytest.fixture
async def pools(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[JobPools]:
    """Pools of jobs that have a folder of code each."""
    folders: dict[str, CodeFolder] = {}
    installing = Packages(
        PackageSettings(no_index=True, folder=tmp_path_factory.getbasetemp() / "packages")
    )

    making = asyncio.Lock()

    async def folder_of(code: str, owner: QueueOwner) -> CodeFolder:
        async with making:
            if code not in folders:
                made = tmp_path / f"code-{code}"
                made.mkdir()
                (made / "scoring.py").write_text(SCORING)
                (made / "words.txt").write_text("right true")
                (made / "requirements.txt").write_text("paceline_leaf")
                write_wheel(made / "wheels", "paceline_leaf", files={"paceline_leaf.py": LEAF})
                wanted = installing.wanted(made)
                assert wanted is not None
                folders[code] = CodeFolder(made, await installing.folder(wanted, owner))
            return folders[code]

    tmp_path.chmod(0o755)
    for each in tmp_path.parents:  # the sandbox may run as another user
        if not each.stat().st_mode & 1 and each.owner() == "root":
            each.chmod(each.stat().st_mode | 0o5)
    pools = JobPools(processes=2, folder_of=folder_of)
    yield pools
    await pools.close()
    await installing.close()


@pytest.fixture
async def scored(pools: JobPools) -> AsyncIterator[Scored]:
    """Scores items with a function of the folder of a job."""
    plain = ChildPool(plain_children(), FairQueue(2))
    scorer = Scorer(pool=plain, job_pools=pools)

    async def run(
        function: str,
        *items: RewardInput,
        job: str = "a",
        timeout_s: float = PATIENCE_S,
        **options: Any,
    ) -> list[Score]:
        part = {"kind": f"scoring:{function}", "timeout_s": timeout_s, **options}
        return await scorer.score(
            json.dumps([part]), items, owner=QueueOwner("t", job), code=f"{job}-code"
        )

    yield run
    await plain.close()


async def test_a_function_of_the_job_scores(scored: Scored, item: MakeItem) -> None:
    scores = await scored("word", item("right"), item("wrong"))
    assert [each.reward for each in scores] == [1.0, 0.0]
    (score,) = await scored("count", item("x"), bonus=0.5)
    assert score.reward == 1.5


async def test_a_function_uses_what_the_job_requires(scored: Scored, item: MakeItem) -> None:
    (score,) = await scored("half", item("3"))
    assert (score.reward, score.detail) == (1.5, "")


async def test_nothing_of_a_job_that_is_over_goes_on(
    scored: Scored, pools: JobPools, item: MakeItem
) -> None:
    await scored("word", item("right"), job="b")
    others = {each.pid for each in psutil.Process().children(recursive=True)}
    await scored("word", item("right"), job="a")
    hanging = asyncio.create_task(scored("try_to", *[item("hang")] * 4, job="a", timeout_s=3600.0))

    def own() -> set[int]:
        return {each.pid for each in psutil.Process().children(recursive=True)} - others

    await wait_until(lambda: len(own()) == 2)
    over = own()
    await pools.end("a")
    scores = await asyncio.wait_for(hanging, PATIENCE_S)
    assert {each.status for each in scores} == {ScoreStatus.INFRA_ERROR}
    await wait_until(lambda: not any(map(psutil.pid_exists, over)))
    (other,) = await scored("count", item("x"), job="b")
    assert other.reward == 1.0


async def wait_until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


async def test_jobs_share_no_process(scored: Scored, item: MakeItem) -> None:
    """What one job leaves behind in its process, another never sees."""
    for _ in range(3):
        await scored("count", item("x"), job="a")
    (other,) = await scored("count", item("x"), job="b")
    assert other.reward == 1.0


async def test_nothing_outside_is_within_reach(
    scored: Scored,
    item: MakeItem,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_SECRET", "1")
    packages_of_others = tmp_path_factory.getbasetemp() / "packages" / "of-others"
    packages_of_others.mkdir(parents=True, exist_ok=True)
    (packages_of_others / "leaf.py").write_text("")
    secret = tmp_path / "secret"
    secret.write_text("token")
    secret.chmod(0o644)
    victim = subprocess.Popen(["sleep", "60"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        deeds = [
            f"read {secret}",
            f"read {packages_of_others / 'leaf.py'}",
            f"read /proc/{os.getpid()}/environ",
            f"write {tmp_path / 'left-behind'}",
            f"connect {server.getsockname()[1]}",
            f"kill {victim.pid}",
            "fork",
            "environ",
            "memory",
        ]
        scores = await scored("try_to", *map(item, deeds))
    assert dict(zip(deeds, (each.reward for each in scores), strict=True)) == dict.fromkeys(
        deeds, 0.0
    )
    assert {(each.status, each.detail) for each in scores} == {(ScoreStatus.OK, "")}
    assert victim.poll() is None
    victim.kill()
    victim.wait()


@pytest.mark.parametrize("deed", ["hang", "loop", "exit"])
async def test_one_that_never_answers_costs_its_own_item(
    scored: Scored, item: MakeItem, deed: str
) -> None:
    await scored("word", item("right"))  # imports are over
    limit_s = PATIENCE_S if deed == "exit" else 6.0
    scores = await scored(
        "try_to", item("environ"), item(deed), item("environ"), job="a", timeout_s=limit_s
    )
    assert [each.status for each in scores] == [
        ScoreStatus.OK,
        ScoreStatus.INFRA_ERROR,
        ScoreStatus.OK,
    ]


async def test_a_job_that_hangs_delays_no_other(scored: Scored, item: MakeItem) -> None:
    await scored("word", item("right"), job="b")
    hanging = asyncio.create_task(scored("try_to", *[item("hang")] * 4, job="a", timeout_s=3600.0))
    await asyncio.sleep(0.5)
    (score,) = await scored("word", item("right"), job="b")
    assert score.reward == 1.0
    assert not hanging.done()
    hanging.cancel()
    await asyncio.wait({hanging})


async def test_a_module_that_does_not_import(scored: Scored, item: MakeItem) -> None:
    (score,) = await scored("missing", item("x"))
    assert score.status is ScoreStatus.INFRA_ERROR
    assert "missing" in score.detail
