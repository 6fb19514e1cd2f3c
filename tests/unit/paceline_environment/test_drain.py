"""A rollout worker that drains or is full: the simulated engine behind real gRPC."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from grpc import aio

from paceline.types import PolicyVersion
from paceline.v1.rollout_pb2_grpc import add_RolloutServicer_to_server
from paceline.weights.canary import NO_CANARY
from paceline_harness.patience import PATIENCE_S
from paceline_harness.peers import FakePeer
from paceline_harness.runtime import FakeClock
from paceline_rollout.engines.simulated import SimulatedEngine
from paceline_rollout.servicer import RolloutServicer
from paceline_rollout.streams import StreamMultiplexer

PROMPT = 6
LENGTH = 40
SPEC: dict[str, Any] = {
    "sampling": {"max_tokens": 48, "max_context": 64, "on_truncation": "score"},
}


class Rollout(FakePeer):
    """Engine and servicer of a rollout worker; tokens are emitted when a request ends or aborts.

    The engine advances only when the test advances the clock.
    """

    version = 0

    def __init__(self, clock: FakeClock, **options: Any) -> None:
        super().__init__()
        settings: dict[str, Any] = {"max_concurrent": 100, "decode_tokens_per_s": 50.0, **options}
        self.engine = SimulatedEngine(
            model_dir=None,
            dtype="float32",
            max_context=64,
            threads=1,
            tokenizer_dir=None,
            job_id="job",
            vocab_size=27,
            tick_s=0.005,
            flush_s=60.0,
            length={"mean": LENGTH},
            clock=clock,
            **settings,
        )
        self.multiplexer = StreamMultiplexer(engine=self.engine)
        self.passing: asyncio.Task[None] | None = None

    def add_to(self, server: aio.Server) -> None:
        status: Any = lambda: (self.engine.status(), PolicyVersion(0, 0), 0.0)  # noqa: E731
        servicer = RolloutServicer(multiplexer=self.multiplexer, worker_id="w", status=status)
        add_RolloutServicer_to_server(servicer, server)

    async def start(self, address: str = "127.0.0.1:0") -> None:
        await self.engine.start()
        header = SimpleNamespace(version=0, tied=(), canary=NO_CANARY)
        await self.engine.load(SimpleNamespace(header=header), "in_flight")
        self.passing = asyncio.create_task(self.multiplexer.run())
        await super().start(address)

    async def stop(self) -> None:
        await super().stop()
        if self.passing is not None:
            self.passing.cancel()
            await asyncio.wait({self.passing})
            await self.engine.close()


async def test_nothing_is_lost_or_sampled_twice_when_a_worker_drains(
    staged: Any, until: Any, assign: Any
) -> None:
    stage = await staged(spec=SPEC, rollouts=0)
    clock = FakeClock()
    stage.rollouts += [Rollout(clock), Rollout(clock)]
    for rollout in stage.rollouts:
        await rollout.start()
    service = await stage.open()
    # A shared prompt outweighs fewer than three requests in flight: both workers get some.
    stage.experience.give([assign(f"g{i}", 4) for i in range(6)])
    staying, leaving = stage.rollouts
    await until(lambda: leaving.multiplexer.num_open + staying.multiplexer.num_open == 24)
    moving = leaving.multiplexer.num_open
    assert 4 < moving < 20
    await until(lambda: all(prefilled(rollout, clock) for rollout in stage.rollouts))
    worked_s = leaving.engine.status().busy_s
    clock.pass_s(0.2)
    await until(lambda: leaving.engine.status().busy_s > worked_s + 0.1)
    stage.announce(rollouts=1)
    await asyncio.wait_for(leaving.multiplexer.drain("draining"), PATIENCE_S)
    handed_back = leaving.engine.status().tokens_generated
    assert handed_back > 4 * moving
    while len(stage.experience.trajectories) < 24:
        clock.pass_s(0.02)
        await asyncio.sleep(0.01)
    found = list(stage.experience.trajectories.values())
    sampled = sum(r.engine.status().tokens_generated for r in stage.rollouts)
    assert sum(t.transcripts[0].num_policy_tokens for t in found) == sampled
    assert all(t.transcripts[0].num_policy_tokens <= LENGTH for t in found)
    assert sum(len(t.provenance.rollout_workers) == 2 for t in found) == moving
    assert service.stages.tokens_resumed == handed_back
    assert not stage.experience.given_back


def prefilled(rollout: Rollout, clock: FakeClock) -> bool:
    """Advance the clock; whether all requests are prefilled."""
    clock.pass_s(0.001)
    return rollout.engine.status().prompt_tokens == PROMPT * rollout.multiplexer.num_open


async def test_turns_do_not_queue_in_full_engines(staged: Any, until: Any, assign: Any) -> None:
    stage = await staged(spec=SPEC, rollouts=0)
    clock = FakeClock()
    rollout = Rollout(clock, max_concurrent=4, decode_tokens_per_s=400.0)
    rollout.load = {"max_running": 4.0}
    stage.rollouts.append(rollout)
    await rollout.start()
    service = await stage.open()
    stage.experience.give([assign(f"g{i}", 4) for i in range(4)])
    await until(lambda: service.stages.waiting["room"] == 11)
    await until(lambda: rollout.multiplexer.num_open == 5)
    queued = service.report().load["queued_tokens"]
    assert queued > 10 * 48
    max_open = 5
    while len(stage.experience.trajectories) < 16:
        max_open = max(max_open, rollout.multiplexer.num_open)
        clock.pass_s(0.005)
        await asyncio.sleep(0.002)
    assert max_open == 5  # four slots and a queue of one
    assert service.report().load["queued_tokens"] == 0
