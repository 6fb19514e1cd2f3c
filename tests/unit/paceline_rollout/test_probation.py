"""Tokens of a version that is not verified yet reach nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.enums import FinishReason
from paceline.plugins import EngineOutput, EngineRequest, EngineStatus
from paceline.types import SamplingParams
from paceline_harness.patience import PATIENCE_S
from paceline_rollout.engines.base import OutputQueue, emit
from paceline_rollout.probation import Probation
from paceline_rollout.streams import CallerRequest, CallerStream, StreamMultiplexer


class Script:
    """An engine that emits what a test tells it to."""

    def __init__(self) -> None:
        self.version = 0
        self.aborted: list[str] = []
        self._queue = OutputQueue()

    def submit(self, batch: Sequence[EngineRequest]) -> None:
        pass

    def abort(self, request_ids: Sequence[str]) -> None:
        for name in request_ids:
            if name not in self.aborted:
                self.aborted.append(name)
                self._queue.put([emit(name, (9,), (-1.0,), version=self.version, reason=ABORT)])

    def emissions(self) -> AsyncIterator[list[EngineOutput]]:
        return self._queue.batches()

    def status(self) -> EngineStatus:
        return EngineStatus("script", "float32", self.version, 0, 0, 0, 0, 64, 32, 0.0, 0.0, 0.0)

    def say(self, name: str, *tokens: int, end: bool = False) -> None:
        reason = FinishReason.STOP if end else None
        logprobs = [-1.0] * len(tokens)
        self._queue.put([emit(name, tokens, logprobs, version=self.version, reason=reason)])


ABORT = FinishReason.ABORT


class Caller:
    """The stream of one caller, and what has arrived on it."""

    def __init__(self, multiplexer: StreamMultiplexer, stream: CallerStream) -> None:
        self._multiplexer = multiplexer
        self._stream = stream
        self.got: list[EngineOutput] = []

    def ask(self, name: str) -> str:
        generation = EngineRequest(name, (1, 2), SamplingParams(max_tokens=8))
        self._multiplexer.submit(self._stream, [CallerRequest(generation)])
        return f"{self._stream.number}/{name}"

    async def read(self) -> None:
        async for batch in self._stream.batches():
            self.got += batch

    async def until(self, num: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.got) < num:
                await asyncio.sleep(0.005)

    def tokens(self) -> list[int]:
        return [token for output in self.got for token in output.tokens]


@asynccontextmanager
async def running(engine: Any) -> AsyncGenerator[tuple[StreamMultiplexer, Caller]]:
    multiplexer = StreamMultiplexer(engine=engine, probation=Probation())
    multiplexer.accept(0)
    caller = Caller(multiplexer, multiplexer.attach())
    tasks = [asyncio.create_task(multiplexer.run()), asyncio.create_task(caller.read())]
    try:
        yield multiplexer, caller
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_tokens_of_a_new_version_wait_for_its_verdict() -> None:
    engine = Script()
    async with running(engine) as (multiplexer, caller):
        first, second = caller.ask("a"), caller.ask("b")
        engine.say(first, 1)
        engine.version = 1
        engine.say(first, 2)
        engine.say(first, 3, end=True)
        engine.version = 0
        engine.say(second, 4)
        await caller.until(2)
        assert caller.tokens() == [1, 4]
        multiplexer.accept(1)
        await caller.until(4)
        assert caller.tokens() == [1, 4, 2, 3]
        assert caller.got[-1].finish_reason is FinishReason.STOP


async def test_tokens_of_a_refused_version_reach_nobody() -> None:
    """Neither those held, nor the last ones of aborted requests, nor those of later requests."""
    engine = Script()
    async with running(engine) as (multiplexer, caller):
        held, quiet = caller.ask("held"), caller.ask("quiet")
        engine.say(held, 1)
        await caller.until(1)
        engine.version = 1
        engine.say(held, 2)
        await asyncio.sleep(0)
        multiplexer.refuse(1)
        await caller.until(3)
        late = caller.ask("late")
        engine.say(late, 3)
        await caller.until(4)
        assert caller.tokens() == [1]
        ends = {output.request_id: output for output in caller.got if output.finish_reason}
        assert set(ends) == {"held", "quiet", "late"}
        assert {end.error_code for end in ends.values()} == {"UNAVAILABLE"}
        assert engine.aborted == [held, quiet, late]
        assert not multiplexer.num_open


async def test_a_worker_that_drains_waits_for_no_verdict() -> None:
    engine = Script()
    async with running(engine) as (multiplexer, caller):
        name = caller.ask("a")
        engine.say(name, 1)
        engine.version = 1
        engine.say(name, 2)
        await caller.until(1)
        draining = asyncio.create_task(multiplexer.drain("drains"))
        await caller.until(2)
        assert caller.tokens() == [1]
        draining.cancel()


RUNS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=6)


@given(RUNS, st.booleans())
def test_what_is_sent_is_a_prefix_with_tokens_of_accepted_versions(
    runs: list[tuple[int, int]], right: bool
) -> None:
    probation, token = Probation(), count()
    probation.accept(0)
    sent: list[EngineOutput] = []
    sampled: list[tuple[int, int]] = []  # token, version
    for version, num in sorted(runs):
        tokens = [next(token) for _ in range(num)]
        sampled += [(each, version) for each in tokens]
        output = emit("a", tokens, [0.0] * num, version=version)
        if (admitted := probation.admit(output)) is not None:
            sent.append(admitted)
    last = replace(emit("a", (), (), version=-1), finish_reason=FinishReason.STOP)
    if (admitted := probation.admit(last)) is not None:
        sent.append(admitted)
    if right:
        sent += [output for version in (1, 2, 3) for output in probation.accept(version)]
    else:
        sent += probation.refuse(3)
    tokens = [each for output in sent for each in output.tokens]
    assert tokens == [each for each, version in sampled if right or version == 0]
    assert sum(output.finish_reason is not None for output in sent) == 1
    whole = right or all(version == 0 for _, version in sampled)
    assert sent[-1].finish_reason is (FinishReason.STOP if whole else FinishReason.ERROR)
    for output in sent:
        assert sum(run.count for run in output.versions) == len(output.tokens)


def test_tokens_of_a_version_that_was_replaced_before_its_verdict_have_none() -> None:
    probation = Probation()
    probation.accept(0)
    outputs = [emit("a", (version,), (0.0,), version=version) for version in range(3)]
    sent = [found for each in outputs if (found := probation.admit(each)) is not None]
    sent += probation.accept(2)
    assert [output.tokens for output in sent] == [(0,), ()]
    assert sent[-1].error_code == "UNAVAILABLE"
    fresh = emit("b", (2,), (0.0,), version=2)
    assert probation.admit(fresh) is fresh


@pytest.mark.parametrize("mixed", [False, True])
def test_an_output_of_two_versions_is_cut_between_them(mixed: bool) -> None:
    probation = Probation()
    probation.accept(0)
    first, second = (emit("a", (i,), (0.0,), version=i) for i in range(2))
    both = replace(
        first,
        tokens=first.tokens + second.tokens,
        logprobs=(0.0, 0.0),
        versions=first.versions + second.versions,
    )
    outputs = [both] if mixed else [first, second]
    sent = [found for each in outputs if (found := probation.admit(each)) is not None]
    sent += probation.refuse(1)
    assert [output.tokens for output in sent if output.tokens] == [(0,)]
    assert sent[-1].error_code == "UNAVAILABLE"
