"""Calls to functions of a child process: answers, errors, streams, and every way to die."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import numpy as np
import psutil
import pytest

from paceline.isolation.calls import CallError, Calls, EndedError
from paceline.isolation.frames import HEAD, MAX_PARTS, FrameError, frame
from paceline.isolation.once import StoppedError, wait_once
from paceline.isolation.pool import ProcessPool
from paceline.isolation.process import PlainProcess
from paceline.isolation.reading import listed_parts, message_of
from paceline_harness.patience import PATIENCE_S

CHILD = """
import os, sys, time
from paceline.errors import InvalidError
from paceline.isolation.child import serve, take_pipes
from paceline.isolation.frames import Frame

def echo(call):
    print("not an answer")
    return Frame(call.fields, call.parts)

def count(call):
    for at in range(call.fields["most"]):
        call.tell({"at": at})
    return {"over": True}

def refuse(call):
    raise InvalidError("no such thing")

def fail(call):
    raise ValueError("broken")

def leave(call):
    print("out of luck", file=sys.stderr)
    os._exit(9)

def wait(call):
    time.sleep(call.fields["seconds"])

def large(call):
    return {"text": "x" * (1 << 21)}

def close(call):
    os.closerange(1, 100)
    time.sleep(1000)

names = (echo, count, refuse, fail, leave, wait, large, close)
serve({each.__name__: each for each in names}, threads=int(sys.argv[1]))
"""
HOSTILE = (
    "import os, sys; sys.stdin.buffer.read(4); os.write(1, bytes.fromhex(sys.argv[1])); input()"
)
Started = Callable[..., AbstractAsyncContextManager[Calls]]


@asynccontextmanager
async def calls_to(*command: str, stderr: int = DEVNULL) -> AsyncGenerator[Calls]:
    process = await PlainProcess.start((sys.executable, *command), stderr=stderr)
    calls = Calls(process, what="child: ")
    try:
        yield calls
    finally:
        await calls.kill()
        assert not psutil.pid_exists(process.pid)


@pytest.fixture
def child(tmp_path: Path) -> Started:
    program = tmp_path / "program.py"
    program.write_text(CHILD)

    def started(*, threads: int = 0, stderr: int = DEVNULL) -> AbstractAsyncContextManager[Calls]:
        return calls_to(str(program), str(threads), stderr=stderr)

    return started


async def test_fields_and_parts_arrive_as_they_were_sent(child: Started) -> None:
    parts: dict[str, Any] = {
        "floats": np.array([0.5, -1.0]),
        "integers": np.arange(3),
        "flags": np.array([True, False]),
        "bytes": b"\0\xff",
        "none": b"",
    }
    async with child() as calls:
        answer = await calls.call("echo", {"text": "é\ud800"}, parts, most_bytes=1 << 10)
    assert answer.fields == {"op": "echo", "text": "é?"}
    assert answer.parts.keys() == parts.keys()
    assert answer.parts["bytes"] == b"\0\xff"
    for name in ("floats", "integers", "flags"):
        assert answer.parts[name].dtype == parts[name].dtype
        assert np.array_equal(answer.parts[name], parts[name])
        assert not answer.parts[name].flags.writeable


async def test_many_calls_are_in_progress_and_a_slow_one_holds_up_no_other(child: Started) -> None:
    async with child(threads=2) as calls:
        slow = asyncio.create_task(calls.call("wait", {"seconds": 1000}))
        quick = [calls.call("echo", {"n": n}) for n in range(20)]
        assert [each.fields["n"] for each in await asyncio.gather(*quick)] == [*range(20)]
        assert calls.num_calls == 1
        slow.cancel()
        await asyncio.wait({slow})
        assert len(calls.late) == 1


async def test_a_late_answer_is_dropped(child: Started) -> None:
    async with child() as calls:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await calls.call("wait", {"seconds": 0.3})
        assert calls.late
        assert (await calls.call("echo", {"n": 1})).fields["n"] == 1
        assert not calls.late


@pytest.mark.parametrize(
    ("op", "words", "kinds"),
    [
        ("refuse", "no such thing", {"InvalidError", "PacelineError"}),
        ("fail", "ValueError: broken", set[str]()),
        ("large", "too much besides its arrays", {"TooLargeError", "PacelineError"}),
        ("unknown", "KeyError: 'unknown'", set[str]()),
    ],
)
async def test_whatever_a_function_raises_is_an_answer(
    child: Started, op: str, words: str, kinds: set[str]
) -> None:
    async with child() as calls:
        with pytest.raises(CallError, match=words) as raised:
            await calls.call(op)
        assert raised.value.kinds == kinds
        assert (await calls.call("echo")).fields == {"op": "echo"}


async def test_a_stream_has_its_answers_in_order_and_waits_for_its_reader(child: Started) -> None:
    async with child() as calls:
        async with calls.stream("count", {"most": 100}) as answers:
            seen = [(await answers.next()).fields["at"] for _ in range(100)]
            assert (await answers.next()).fields == {"over": True}
            with pytest.raises(EndedError, match="less than it was asked for"):
                await answers.next()
        assert seen == [*range(100)]
        async with calls.stream("fail") as answers:
            with pytest.raises(CallError, match="broken"):
                await answers.next()
        async with calls.stream("count", {"most": 100}) as answers:
            assert (await answers.next()).fields == {"at": 0}
        with pytest.raises(EndedError, match="more than once"):  # nobody reads the rest
            await calls.call("echo")


async def test_the_end_of_a_process_is_the_end_of_all_its_calls(child: Started) -> None:
    async with child(threads=4, stderr=PIPE) as calls:
        waiting = [asyncio.create_task(calls.call("wait", {"seconds": 1000})) for _ in range(2)]
        async with calls.stream("wait", {"seconds": 1000}) as answers:
            with pytest.raises(EndedError, match="child: its process has ended"):
                await calls.call("leave")
            with pytest.raises(EndedError):
                await answers.next()
        for each in waiting:
            with pytest.raises(EndedError) as raised:
                await each
            assert raised.value.how == "exit code 9, out of luck"
        with pytest.raises(EndedError, match="out of luck"):
            await calls.call("echo")


async def test_a_process_that_closes_its_pipe_is_ended(child: Started) -> None:
    async with child() as calls:
        with pytest.raises(EndedError, match=r"has ended \(exit code -9\)"):
            await calls.call("close")


async def test_a_kill_is_told_to_those_who_wait(child: Started) -> None:
    async with child() as calls:
        waiting = asyncio.create_task(calls.call("wait", {"seconds": 1000}))
        await asyncio.sleep(0)
        await calls.kill("enough")
        with pytest.raises(EndedError, match="enough"):
            await waiting


def framed(fields: object, after: bytes = b"") -> str:
    body = json.dumps(fields).encode()
    return (HEAD.pack(len(body)) + body + after).hex()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("ffffffff", "answered with 4294967295 bytes"),
        (framed([1]), "not an object"),
        (HEAD.pack(2).hex() + "7b7b", "unreadable answer"),
        (framed({"$id": 7}), "answered to 7, which nobody has asked"),
        (framed({"$id": "0"}), "answered to '0'"),
        (framed({"$id": 0, "$more": True}), "more than once"),
        (framed({"$id": 0, "$parts": 1}), "no list of parts"),
        (framed({"$id": 0, "$parts": [["a", "f8", -1]]}), "a part"),
        (framed({"$id": 0, "$parts": [["a", "O", 1]]}), "a part"),
        (framed({"$id": 0, "$parts": [["a", "f8", 3]]}, bytes(24)), "answered with 24 bytes"),
        (framed({"$id": 0, "$parts": [["a", "raw", 1]] * (MAX_PARTS + 1)}), "no list of parts"),
    ],
)
async def test_what_is_no_answer_ends_the_process(data: str, words: str) -> None:
    async with calls_to("-c", HOSTILE, data) as calls:
        with pytest.raises(EndedError, match=words):
            await calls.call("echo", most_bytes=16)


def test_one_call_of_a_thread(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(CHILD)
    once = partial(wait_once, (sys.executable, str(program), "0"), stderr=DEVNULL)
    assert once("echo", {"n": 1}, timeout_s=PATIENCE_S).fields["n"] == 1
    with pytest.raises(CallError, match="no such thing"):
        once("refuse", {}, timeout_s=PATIENCE_S)
    with pytest.raises(EndedError, match="exit code 9"):
        once("leave", {}, timeout_s=PATIENCE_S)
    with pytest.raises(TimeoutError):
        once("wait", {"seconds": 1000}, timeout_s=0.5)
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(StoppedError):
        once("echo", {}, timeout_s=PATIENCE_S, stopped=stopped)


@pytest.mark.parametrize("cut", [0, 3, -1])
def test_an_answer_that_is_cut_is_none(cut: int) -> None:
    with pytest.raises(FrameError):
        message_of(frame({"$id": 0})[:cut])


def test_parts_are_taken_out_of_the_fields() -> None:
    fields: dict[str, Any] = {"$parts": [["a", "b1", 2]], "n": 1}
    assert listed_parts(fields, 2) == [("a", "b1", 2)]
    assert fields == {"n": 1}


async def test_a_pool_keeps_what_is_intact(child: Started, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(CHILD)

    async def start() -> Calls:
        return Calls(await PlainProcess.start((sys.executable, str(program), "0"), stderr=DEVNULL))

    pool = ProcessPool(start)
    async with pool.taken() as first:
        await first.call("echo")
    async with pool.taken() as again, pool.taken() as second:
        assert again is first
        assert pool.num_alive == 2
    with pytest.raises(CallError):
        async with pool.taken() as third:
            await third.call("fail")
    assert pool.num_alive == 1
    async with pool.taken() as kept:
        assert kept in {first, second}
        with pytest.raises(EndedError):
            await kept.call("leave")
    assert pool.num_alive == 0
    async with pool.taken():
        pass
    assert await pool.end_idle()
    assert not await pool.end_idle()
    await pool.close()
    with pytest.raises(Exception, match="closed"):
        async with pool.taken():
            pass
