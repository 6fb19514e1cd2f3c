"""The transform of a job's own code, in a sealed process of the job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from paceline.enums import Purpose
from paceline.errors import DeadlineError, InvalidError, PacelineError
from paceline.isolation.code.archive import pack
from paceline.isolation.code.folders import CodeFolders
from paceline.isolation.code.sealed import sandbox_for
from paceline.isolation.code.world_process import MODULE
from paceline.isolation.sandbox import landlock
from paceline.plugins import Message, Observation, TransformContext
from paceline.types import Task
from paceline_environment.variants import JobTransform
from paceline_environment.worlds.worlds import JobWorlds
from paceline_harness.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(landlock.abi() < 6, reason="needs Landlock with scopes")
CODE = """
import json, os, socket, time
from paceline.plugins import Message, Variant

def reaching(observation, context, *, secret):
    attacks = {
        "read": lambda: open(secret),
        "list": lambda: os.listdir("/proc/self"),
        "write": lambda: open(secret + ".more", "w"),
        "change its code": lambda: open(__file__, "a"),
        "fork": os.fork,
        "execute": lambda: os.execv("/bin/true", ["true"]),
        "signal": lambda: os.kill(os.getppid(), 0),
        "connect": lambda: socket.create_connection(("127.0.0.1", 9)),
        "connect to a path": lambda: socket.socket(socket.AF_UNIX),
    }
    done = []
    for name, attack in attacks.items():
        try:
            attack()
            done.append(name)
        except ConnectionError:
            done.append(name)
        except OSError:
            pass
    return Variant(text=f"done: {done}")

async def prefixed(observation, context, *, words="Think."):
    number = json.loads(context.task.payload)["number"]
    text = f"{words} {observation.messages[0].content} {number} {context.seed} {context.purpose}"
    first = Message("user", text)
    messages = (first, *observation.messages[1:])
    return Variant(messages=messages, name=context.variant or "own", meta={"n": number})

def wrong(observation, context, *, how):
    if how == "text":
        return "no variant"
    if how == "raise":
        raise RuntimeError("a bug")
    if how == "nothing":
        return Variant()
    if how == "nan":
        return Variant(text="x", meta={"n": float("nan")})
    if how == "long":
        return Variant(text="x", meta={"n": "y" * 100_000})
    if how == "train_as":
        return Variant(text="x", train_as="both")
    if how == "loop":
        while True:
            pass
    if how == "exit":
        os._exit(3)

LETTERS = "abc"
"""
FIRST = Observation(messages=(Message("user", "hello"), Message("assistant", "yes")), text="hello")
CONTEXT = TransformContext(Task("t", "e", '{"number": 7}'), Purpose.TRAIN, seed=3, variant="v")
Made = Callable[..., JobTransform]


@pytest.fixture
async def worlds(tmp_path: Path) -> AsyncIterator[tuple[JobWorlds, str]]:
    """Those of a worker, and the digest of a job's code."""
    (tmp_path / "own.py").write_text(CODE)
    archive = BytesIO()
    code = pack(tmp_path, archive)

    async def fetch(digest: str, into: BinaryIO) -> None:
        del digest
        into.write(archive.getvalue())

    folders, sandbox = CodeFolders(fetch, packages=None), sandbox_for(MODULE)
    made = JobWorlds(sandbox=sandbox, folders=folders, memory_bytes=1 << 30, max_processes=4)
    sweeping = asyncio.create_task(made.sweep())
    yield made, code
    sweeping.cancel()
    await made.close()
    await sandbox.close()
    await folders.close()


@pytest.fixture
def transform(worlds: tuple[JobWorlds, str]) -> Made:
    made, code = worlds

    def of(name: str, timeout_s: float = PATIENCE_S, **options: Any) -> JobTransform:
        target = f"own:{name}"
        call = made.transform(f"job-{name}", code=code, target=target, options=options)
        return JobTransform(call, kind=target, timeout_s=timeout_s)

    return of


async def test_it_is_given_what_an_installed_one_is_given(transform: Made) -> None:
    shown = await transform("prefixed", words="So:")(FIRST, CONTEXT)
    assert shown.observation.messages[0].content == "So: hello 7 3 train"
    assert shown.observation.messages[1:] == FIRST.messages[1:]
    assert (shown.name, shown.meta, shown.original) == ("v", '{"n": 7}', False)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("wrong", {"how": "text"}, "it returned str; Variant is needed"),
        ("wrong", {"how": "raise"}, r"RuntimeError: a bug \(own.py:\d+\)"),
        ("wrong", {"how": "nothing"}, "an empty prompt"),
        ("wrong", {"how": "nan"}, "not JSON compliant|unreadable"),
        ("wrong", {"how": "long"}, "at most 1024 are allowed"),
        ("wrong", {"how": "train_as"}, "train_as 'both'; allowed: sampled, original"),
        ("LETTERS", {}, "own:LETTERS is a str, no function"),
        ("missing", {}, "has no attribute 'missing'"),
    ],
)
async def test_what_it_does_wrong_is_told_with_its_field(
    transform: Made, name: str, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidError, match=f"tasks.transform: own:{name}: .*({told})"):
        await transform(name, **options)(FIRST, CONTEXT)


async def test_it_reaches_no_file_process_or_network(transform: Made, tmp_path: Path) -> None:
    """As the worlds of a job, which have the same processes."""
    (tmp_path / "secret").write_text("of another job")
    reaching = transform("reaching", secret=str(tmp_path / "secret"))
    assert (await reaching(FIRST, CONTEXT)).observation.text == "done: []"


async def test_one_that_hangs_or_ends_costs_its_own_call_only(transform: Made) -> None:
    honest = transform("prefixed")
    await honest(FIRST, CONTEXT)
    warm = transform("wrong", how="nothing")
    with pytest.raises(InvalidError):  # its process is loaded
        await warm(FIRST, CONTEXT)
    with pytest.raises(DeadlineError, match=r"took more than 0.3 s \(tasks.step_timeout_s\)"):
        await transform("wrong", timeout_s=0.3, how="loop")(FIRST, CONTEXT)
    with pytest.raises(PacelineError, match=r"tasks\.transform: own:wrong: "):
        await transform("wrong", how="exit")(FIRST, CONTEXT)
    with pytest.raises(InvalidError, match="an empty prompt"):
        await warm(FIRST, CONTEXT)  # in another process
    assert (await honest(FIRST, CONTEXT)).name == "v"


async def test_its_processes_end_with_the_job(
    worlds: tuple[JobWorlds, str], transform: Made
) -> None:
    made = transform("prefixed")
    await made(FIRST, CONTEXT)
    assert worlds[0].jobs == {"job-prefixed"}
    await worlds[0].end("job-prefixed")
    assert worlds[0].jobs == set()
    with pytest.raises(PacelineError, match="its job is over"):
        await made(FIRST, CONTEXT)
