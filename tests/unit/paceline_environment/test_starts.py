"""What is decided on single episodes: limits, a sibling to continue, a recall."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.enums import TokenSource
from paceline.platform import wire
from paceline.types import EpisodeStart, Trajectory
from paceline.v1 import experience_pb2, types_pb2
from paceline_experience.ledger.generation.prefix import prefix_of
from paceline_experience.store.payloads import pack

EOS = 1
SPEC: dict[str, Any] = {
    "tasks": {"environment": "talking"},
    "sampling": {"max_tokens": 8, "max_context": 256, "on_truncation": "score"},
}


def every_third_ends(seed: int, position: int) -> int:
    del seed
    return EOS if position % 3 == 0 else 5


def never_ends(seed: int, position: int) -> int:
    del seed, position
    return 5


async def ran(stage: Any, until: Any, assignment: Any) -> list[Trajectory]:
    stage.experience.trajectories.clear()
    stage.experience.give([assignment])
    await until(lambda: len(stage.experience.trajectories) == len(assignment.indices))
    return [stage.experience.trajectories["g0", index] for index in assignment.indices]


async def test_limits_hold_for_their_own_episode(staged: Any, until: Any, assign: Any) -> None:
    stage = await staged(spec=SPEC, chat=True)
    stage.rollouts[0].speak = every_third_ends
    await stage.open()
    starts = (
        EpisodeStart(max_turns=2, variant="short", meta='{"a": 1}'),
        EpisodeStart(max_tokens=2),
        EpisodeStart(temperature=0.25),
    )
    short, few, cold = await ran(stage, until, assign(size=3, starts=starts))
    assert [len(each.transcripts[0].steps) for each in (short, cold)] == [2, 3]
    assert [each.truncated for each in (short, few, cold)] == [True, True, False]
    assert few.num_policy_tokens == 2 < cold.num_policy_tokens
    assert [each.sampling.temperature for each in (short, few, cold)] == [1.0, 1.0, 0.25]
    asked = {each.sampling.temperature for each in stage.rollouts[0].requests}
    assert asked == {1.0, 0.25}
    found = short.provenance
    assert (found.prompt_variant, found.variant_meta) == ("short", '{"a": 1}')


@pytest.mark.parametrize("kept", range(3, 16))
async def test_an_episode_continues_a_sibling_wherever_it_is_cut(
    staged: Any, until: Any, assign: Any, kept: int
) -> None:
    """With the same tokens at each position, it must become what its sibling was."""
    stage = await staged(spec=SPEC, chat=True)
    stage.rollouts[0].speak = every_third_ends
    await stage.open()
    (sibling,) = await ran(stage, until, assign(size=1))
    payload = pack(wire.to_proto(sibling, types_pb2.Trajectory).SerializeToString(), 1 << 20)
    begun = prefix_of(payload, kept, parent=0, group_id="g0", index=1, attempt=1)
    whole = sibling.transcripts[0]
    first = next(span for span in whole.spans if span.source is TokenSource.POLICY)
    if kept <= first.start:
        assert begun is None
        return
    assert begun is not None
    branch = begun.transcripts[0].branch_token
    assert first.start < branch <= kept
    assert whole.tokens[:branch] == begun.transcripts[0].tokens
    child = assign(
        size=1,
        indices=(1,),
        starts=(EpisodeStart(parent=0, parent_tokens=kept),),
        progress=(begun,),
    )
    (found,) = await ran(stage, until, child)
    assert found.transcripts[0] == replace(whole, parent=0, branch_token=branch)
    assert found.environment_reward == sibling.environment_reward == 3.0
    assert found.sampling.seed != sibling.sampling.seed


async def test_a_recalled_episode_is_given_back_with_all_its_tokens(
    staged: Any, until: Any, assign: Any
) -> None:
    """Its progress is sent before it is given back; the other one goes on."""
    stage = await staged(flush_s=60.0)
    rollout, told = stage.rollouts[0], stage.experience
    rollout.speak, rollout.single = never_ends, True
    rollout.frozen.clear()
    service = await stage.open()
    told.give([assign(size=2)])
    await until(lambda: len(rollout.requests) == 2)
    rollout.frozen.set()
    await until(lambda: all(e.episode.num_sampled for e in service.worker._open.values()))
    told.abort(
        experience_pb2.EpisodeKey(
            job_id="job",
            group_id="g0",
            index=1,
            attempt=1,
            reason=experience_pb2.GIVE_BACK_REASON_DRAIN,
        )
    )
    await until(lambda: told.given_back)
    (key,), (progress,) = told.given_back, told.progress
    assert (key.index, key.reason) == (1, experience_pb2.GIVE_BACK_REASON_DRAIN)
    assert (progress.index, len(progress.transcripts[0].logprobs)) == (1, 1)
    stage.resume()
    await until(lambda: told.trajectories)
    assert [index for _, index in told.trajectories] == [0]
