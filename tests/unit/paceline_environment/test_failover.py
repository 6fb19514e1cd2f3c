from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline.platform.digest import number
from paceline.types import Trajectory
from paceline.v1 import experience_pb2 as pb

EOS = 1


def speak(seed: int, position: int) -> int:
    drawn = number(seed, position)
    return EOS if drawn % 6 == 0 else 4 + drawn % 10


def late(seed: int, position: int) -> int:
    """Never ends within the first tokens."""
    return speak(seed, position) if position > 12 else 5


def check(trajectory: Trajectory, *, max_tokens: int) -> None:
    """The tokens are those that a single worker would have sampled."""
    tokens = trajectory.transcripts[0].tokens
    start = trajectory.transcripts[0].spans[0].end
    seed = trajectory.sampling.seed
    assert list(tokens[start:]) == [speak(seed, at) for at in range(start, len(tokens))]
    assert tokens[-1] == EOS or len(tokens) == start + max_tokens


SPEC: dict[str, Any] = {
    "sampling": {"max_tokens": 24, "max_context": 64, "on_truncation": "score"},
}
QUICK: dict[str, Any] = {"reward": [{"kind": "exact", "timeout_s": 0.1}]}


async def test_a_rollout_worker_dies_amid_generation(staged: Any, until: Any, assign: Any) -> None:
    stage = await staged(spec=SPEC, rollouts=2, flush_s=0.1)
    for rollout in stage.rollouts:
        rollout.speak, rollout.single = late, True
        rollout.frozen.clear()
    await stage.open()
    stage.experience.give([assign(f"g{i}", 4) for i in range(4)])
    await until(lambda: sum(len(r.requests) for r in stage.rollouts) == 16)
    for rollout in stage.rollouts:
        rollout.frozen.set()
    await until(lambda: len({(p.group_id, p.index) for p in stage.experience.progress}) == 16)
    await stage.rollouts[0].stop()
    stage.resume()
    await until(lambda: len(stage.experience.trajectories) == 16)
    moved = [
        t for t in stage.experience.trajectories.values() if len(t.provenance.rollout_workers) > 1
    ]
    assert moved
    assert not stage.experience.given_back
    for trajectory in stage.experience.trajectories.values():
        tokens, start = trajectory.transcripts[0].tokens, trajectory.transcripts[0].spans[0].end
        seed = trajectory.sampling.seed
        expected = [late(seed, at) for at in range(start, len(tokens))]
        assert list(tokens[start:]) == expected
        runs = trajectory.transcripts[0].versions
        assert tuple(run.worker for run in runs) == trajectory.provenance.rollout_workers
        assert sum(run.count for run in runs) == len(tokens) - start
    resumed = [r for r in stage.rollouts[1].requests if r.request_id.endswith(".2")]
    assert resumed
    assert all(len(r.tokens) > 6 and r.sampling.max_tokens < 24 for r in resumed)


async def test_a_rollout_worker_comes_back(staged: Any, until: Any, assign: Any) -> None:
    stage = await staged(spec=SPEC, pause_s=0.05)
    await stage.open()
    stage.experience.give([assign(size=4)])
    rollout = stage.rollouts[0]
    await until(lambda: rollout.num_tokens > 2)
    async with rollout.away():
        await asyncio.sleep(0.2)
    await until(lambda: len(stage.experience.trajectories) == 4)
    for trajectory in stage.experience.trajectories.values():
        check(trajectory, max_tokens=24)


async def test_without_rollout_workers_episodes_wait(staged: Any, until: Any, assign: Any) -> None:
    stage = await staged()
    service = await stage.open(rollouts=0)
    stage.experience.give([assign(size=2)])
    await until(lambda: service.stages.waiting["generate"] == 2)
    await asyncio.sleep(0.1)
    assert not stage.experience.given_back
    stage.announce()
    await until(lambda: len(stage.experience.trajectories) == 2)


async def test_siblings_share_a_rollout_worker(staged: Any, until: Any, assign: Any) -> None:
    stage = await staged(rollouts=2)
    for rollout in stage.rollouts:
        rollout.frozen.clear()
    await stage.open()
    stage.experience.give([assign(f"g{i}", 4) for i in range(2)])
    await until(lambda: sum(len(r.requests) for r in stage.rollouts) == 8)
    stage.resume()
    await until(lambda: len(stage.experience.trajectories) == 8)
    for rollout in stage.rollouts:
        assert len({r.request_id.split("/")[0] for r in rollout.requests}) == 1


async def test_workers_with_weights_that_are_too_old_get_no_turns(
    staged: Any, until: Any, assign: Any
) -> None:
    stage = await staged(rollouts=3)
    for version, rollout in enumerate(stage.rollouts):
        rollout.version = version
    await stage.open()
    stage.rollouts[1].version = 0  # older than the roster says
    stage.experience.give([assign(f"g{i}", 2, min_version=1) for i in range(8)])
    await until(lambda: len(stage.experience.trajectories) == 16)
    assert not stage.experience.given_back
    assert not stage.rollouts[0].num_tokens + stage.rollouts[1].num_tokens
    assert not stage.rollouts[0].requests
    assert stage.rollouts[1].requests


async def test_turns_wait_until_weights_are_new_enough(
    staged: Any, until: Any, assign: Any
) -> None:
    stage = await staged()
    service = await stage.open()
    stage.experience.give([assign(size=2, min_version=1)])
    await until(lambda: service.stages.waiting["generate"] == 2)
    await asyncio.sleep(0.1)
    assert not stage.rollouts[0].requests
    stage.rollouts[0].version = 1
    stage.announce()
    await until(lambda: len(stage.experience.trajectories) == 2)


async def test_a_reward_worker_hangs(staged: Any, until: Any, assign: Any) -> None:
    # The answer of the other worker has to arrive within its timeout, too.
    stage = await staged(rewards=2, spec=QUICK, score_timeout_s=5.0)
    stage.rewards[0].hang = True
    await stage.open()
    stage.experience.give([assign(size=4)])
    await until(lambda: len(stage.experience.trajectories) == 4)
    assert stage.rewards[0].num_calls >= 1, "it was not asked"
    assert not stage.experience.given_back


async def test_a_slow_reward_part_has_its_own_timeout(staged: Any, until: Any, assign: Any) -> None:
    slow = {"reward": [{"kind": "exact"}, {"kind": "exact", "name": "judge", "timeout_s": 120.0}]}
    stage = await staged(spec=slow, score_timeout_s=0.05)
    stage.rewards[0].pause_s = 0.5
    await stage.open()
    stage.experience.give([assign(size=2)])
    await until(lambda: len(stage.experience.trajectories) == 2)
    assert not stage.experience.given_back


async def test_a_reward_worker_crashes(staged: Any, until: Any, assign: Any) -> None:
    stage = await staged(rewards=2)
    await stage.open()
    await stage.rewards[0].stop()
    stage.experience.give([assign(size=4)])
    await until(lambda: len(stage.experience.trajectories) == 4)
    assert not stage.experience.given_back


async def test_no_reward_worker_at_all(staged: Any, until: Any, assign: Any) -> None:
    stage = await staged(rewards=0, spec=QUICK, score_timeout_s=0.2)
    await stage.open()
    stage.experience.give([assign(size=2)])
    await until(lambda: len(stage.experience.given_back) == 2)
    assert {key.reason for key in stage.experience.given_back} == {pb.GIVE_BACK_REASON_INFRA_ERROR}
    assert "no reward worker" in stage.experience.given_back[0].detail


async def test_an_infra_error_is_never_a_zero(staged: Any, until: Any, assign: Any) -> None:
    stage = await staged()
    stage.rewards[0].status = "infra_error"
    await stage.open()
    stage.experience.give([assign(size=2)])
    await until(lambda: len(stage.experience.given_back) == 2)
    assert {key.reason for key in stage.experience.given_back} == {pb.GIVE_BACK_REASON_INFRA_ERROR}
    assert not stage.experience.trajectories


@pytest.mark.parametrize("when", ["generating", "finished"])
async def test_experience_restarts(staged: Any, until: Any, assign: Any, when: str) -> None:
    """Open episodes continue; those that finished meanwhile are submitted when it is back."""
    stage = await staged()
    stage.rollouts[0].frozen.clear()
    service = await stage.open()
    stage.experience.give([assign(size=4)])
    await until(lambda: len(stage.rollouts[0].requests) == 4)
    async with stage.experience.away():
        if when == "finished":
            stage.resume()
            await until(lambda: service.stages.waiting["submit"] == 4)
    stage.resume()
    await until(lambda: len(stage.experience.trajectories) == 4)
    await until(lambda: service.stages.finished == 4)
    await until(lambda: len(stage.experience.hellos) == 2)
    second = stage.experience.hellos[1]
    assert second.credits + len(second.renew) == 1024
    stage.experience.give([assign("g1", 2)])
    await until(lambda: len(stage.experience.trajectories) == 6)


async def test_a_refused_trajectory_does_not_hold_up_others(
    staged: Any, until: Any, assign: Any
) -> None:
    stage = await staged()
    stage.experience.refused = {("g0", 1)}
    await stage.open()
    stage.experience.give([assign(size=3)])
    await until(lambda: len(stage.experience.trajectories) == 2)
    await until(lambda: stage.experience.given_back)
    assert stage.experience.given_back[0].reason == pb.GIVE_BACK_REASON_INVALID


async def test_a_job_that_cannot_be_read_at_first(staged: Any, until: Any, assign: Any) -> None:
    """A job whose files are missing at first is given back, and read at the next assignment."""
    stage = await staged()
    files, stage.experience.files = stage.experience.files, {}
    await stage.open()
    stage.experience.give([assign(size=2)])
    await until(lambda: len(stage.experience.given_back) == 2)
    assert {key.reason for key in stage.experience.given_back} == {pb.GIVE_BACK_REASON_INFRA_ERROR}
    stage.experience.files = files
    stage.experience.give([assign(size=2, attempts=(2, 2))])
    await until(lambda: len(stage.experience.trajectories) == 2)
