from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from paceline.enums import Purpose, TokenSource
from paceline.platform.digest import number
from paceline.platform.transport.rpc import connect
from paceline.types import EpisodeProgress, TokenSpan, Trajectory, Transcript, VersionRun
from paceline.v1 import environment_pb2
from paceline.v1 import experience_pb2 as pb
from paceline.v1.environment_pb2_grpc import EnvironmentStub
from paceline.v1.experience_pb2 import EpisodeKey

EOS = 1
TALKING: dict[str, Any] = {"environment": "talking"}
WIDE = {"max_tokens": 8, "max_context": 256, "on_truncation": "score"}


def speak(seed: int, position: int) -> int:
    drawn = number(seed, position)
    return EOS if drawn % 6 == 0 else 4 + drawn % 10


def says(token_at: Callable[[int], int]) -> Callable[[int, int], int]:
    """The same tokens for every seed."""

    def speak(seed: int, position: int) -> int:
        del seed
        return token_at(position)

    return speak


def expected(trajectory: Trajectory) -> list[int]:
    """The policy's tokens after the first prompt, on any worker."""
    transcript = trajectory.transcripts[0]
    position = transcript.spans[0].end
    said: list[int] = []
    while len(said) < 8 and (not said or said[-1] != EOS):
        said.append(speak(trajectory.sampling.seed, position + len(said)))
    return said


async def test_a_group_is_run_scored_and_submitted(staged: Any, until: Any, assign: Any) -> None:
    stage = await staged()
    await stage.open()
    stage.experience.give([assign()])
    await until(lambda: len(stage.experience.trajectories) == 4)
    for trajectory in stage.experience.trajectories.values():
        transcript = trajectory.transcripts[0]
        assert list(transcript.tokens[6:]) == expected(trajectory)
        assert transcript.spans[0] == TokenSpan(0, 6, TokenSource.ENVIRONMENT)
        assert transcript.versions == (VersionRun(0, len(transcript.tokens) - 6, "rollout-0"),)
        assert trajectory.truncated == (transcript.tokens[-1] != EOS)
        assert trajectory.provenance.environment_worker == "env-0"
        assert trajectory.provenance.rollout_workers == ("rollout-0",)
        assert trajectory.timing.total_s > 0
    seeds = {t.sampling.seed for t in stage.experience.trajectories.values()}
    assert len(seeds) == 4


async def test_a_group_costs_one_message_each_way(staged: Any, until: Any, assign: Any) -> None:
    stage = await staged()
    await stage.open()
    stage.experience.give([assign(f"g{i}", 8) for i in range(4)])
    await until(lambda: len(stage.experience.trajectories) == 32)
    assert stage.rollouts[0].num_batches <= 2
    assert len(stage.rollouts[0].requests) == 32


async def test_right_answers_are_rewarded_with_one(staged: Any, until: Any, assign: Any) -> None:
    stage = await staged()
    stage.rollouts[0].speak = says(lambda position: {6: 8, 7: 10}.get(position, EOS))
    await stage.open()
    stage.experience.give([assign(size=1)])
    await until(lambda: stage.experience.trajectories)
    (trajectory,) = stage.experience.trajectories.values()
    assert trajectory.response_text == "46"
    assert (trajectory.prompt_text, trajectory.completion_text) == ("12+34=", "")
    assert trajectory.environment_reward == trajectory.score.reward == 1.0


async def test_a_dialogue_keeps_its_tokens(staged: Any, until: Any, assign: Any) -> None:
    stage = await staged(spec={"tasks": TALKING, "sampling": WIDE}, chat=True)
    stage.rollouts[0].speak = says(lambda position: EOS if position % 3 == 0 else 5)
    await stage.open()
    stage.experience.give([assign(size=2)])
    await until(lambda: len(stage.experience.trajectories) == 2)
    trajectory = stage.experience.trajectories["g0", 0]
    transcript = trajectory.transcripts[0]
    assert trajectory.environment_reward == 3.0
    assert len(transcript.steps) == 3
    assert [s.source for s in transcript.spans].count(TokenSource.POLICY) == 3
    last = stage.rollouts[0].requests[-1]
    assert tuple(last.tokens) == transcript.tokens[: len(last.tokens)]
    assert trajectory.prompt_text == "<|user|>q0</s><|assistant|>"
    assert trajectory.completion_text == (
        "1</s><|user|>q1</s><|assistant|></s><|user|>q2</s><|assistant|>"
    )
    ends = transcript.tokens.count(EOS)
    assert ends == 6  # three asked, three answered: none twice


async def test_length_in_a_dialogue_ends_it(staged: Any, until: Any, assign: Any) -> None:
    stage = await staged(spec={"tasks": TALKING, "sampling": WIDE}, chat=True)
    stage.rollouts[0].speak = says(lambda position: 5)
    await stage.open()
    stage.experience.give([assign(size=1)])
    await until(lambda: stage.experience.trajectories)
    (trajectory,) = stage.experience.trajectories.values()
    assert trajectory.truncated
    assert trajectory.num_policy_tokens == 8


async def test_an_observation_too_long_ends_it(staged: Any, until: Any, assign: Any) -> None:
    sampling = {"max_tokens": 8, "max_context": 12, "on_truncation": "score"}
    stage = await staged(spec={"tasks": TALKING, "sampling": sampling}, chat=True)
    stage.rollouts[0].speak = says(lambda position: EOS if position == 9 else 5)
    await stage.open()
    stage.experience.give([assign(size=1)])
    await until(lambda: stage.experience.trajectories)
    (trajectory,) = stage.experience.trajectories.values()
    assert trajectory.truncated
    assert trajectory.num_tokens <= 12


async def test_truncated_zero_is_not_scored(staged: Any, until: Any, assign: Any) -> None:
    sampling = {"max_tokens": 4, "max_context": 64, "on_truncation": "zero"}
    stage = await staged(spec={"sampling": sampling})
    stage.rollouts[0].speak = says(lambda position: 5)
    await stage.open()
    stage.experience.give([assign(size=2)])
    await until(lambda: len(stage.experience.trajectories) == 2)
    assert {t.score.reward for t in stage.experience.trajectories.values()} == {0.0}
    assert not stage.rewards[0].items


async def test_a_prompt_too_long_is_invalid(staged: Any, until: Any, assign: Any) -> None:
    sampling = {"max_tokens": 2, "max_context": 6, "on_truncation": "score"}
    stage = await staged(spec={"sampling": sampling})
    await stage.open()
    stage.experience.give([assign(size=2)])
    await until(lambda: len(stage.experience.given_back) == 2)
    key = stage.experience.given_back[0]
    assert (key.reason, key.attempt) == (pb.GIVE_BACK_REASON_INVALID, 1)
    assert key.detail.startswith("prompt of 6 tokens does not fit max_context 6")


async def test_a_turn_is_shortened_to_fit_the_context(staged: Any, until: Any, assign: Any) -> None:
    sampling = {"max_tokens": 8, "max_context": 9, "on_truncation": "score"}
    stage = await staged(spec={"sampling": sampling})
    stage.rollouts[0].speak = says(lambda position: 5)
    await stage.open()
    stage.experience.give([assign(size=1)])
    await until(lambda: stage.experience.trajectories)
    (trajectory,) = stage.experience.trajectories.values()
    assert (trajectory.num_tokens, trajectory.truncated) == (9, True)


@pytest.mark.parametrize(
    ("world", "detail"),
    [("hanging", "step took more than 0.2 s"), ("crashing", "ZeroDivisionError: a plug-in")],
)
async def test_a_broken_world_is_given_back(
    staged: Any, until: Any, assign: Any, world: str, detail: str
) -> None:
    tasks = {"environment": world, "step_timeout_s": 0.2}
    stage = await staged(spec={"tasks": tasks})
    await stage.open()
    stage.experience.give([assign(size=1)])
    await until(lambda: stage.experience.given_back)
    (key,) = stage.experience.given_back
    assert key.reason == pb.GIVE_BACK_REASON_INFRA_ERROR
    assert detail in key.detail


async def test_counters_of_episodes_start_at_zero(staged: Any, until: Any, assign: Any) -> None:
    """`rate()` misses the first events of a counter that appears with them."""
    stage = await staged(spec={"tasks": {"environment": "crashing"}})
    await stage.open()
    sample = stage.metrics.registry.get_sample_value
    failed = "paceline_given_back_episodes_total", {"cause": "infra_error"}
    assert sample("paceline_finished_episodes_total") == 0.0
    assert sample(*failed) == 0.0
    stage.experience.give([assign(size=1)])
    await until(lambda: sample(*failed))
    assert sample("paceline_finished_episodes_total") == 0.0


async def test_an_episode_has_a_deadline(staged: Any, until: Any, assign: Any) -> None:
    tasks = {"environment": "arithmetic", "episode_timeout_s": 0.3}
    stage = await staged(spec={"tasks": tasks}, flush_s=0.2)
    stage.rollouts[0].frozen.clear()
    await stage.open()
    stage.experience.give([assign(size=1)])
    await until(lambda: stage.experience.given_back)
    assert "took more than 0.3 s" in stage.experience.given_back[0].detail
    await until(lambda: stage.rollouts[0].aborted or not stage.rollouts[0].requests)


async def test_an_abort_stops_an_episode(staged: Any, until: Any, assign: Any) -> None:
    stage = await staged()
    stage.rollouts[0].frozen.clear()
    service = await stage.open()
    stage.experience.give([assign(size=2)])
    await until(lambda: len(stage.rollouts[0].requests) == 2)
    stage.experience.abort(EpisodeKey(job_id="job", group_id="g0", index=0, attempt=1))
    await until(lambda: stage.rollouts[0].aborted)
    assert service.worker.num_open == 1
    stage.resume()
    await until(lambda: stage.experience.trajectories)
    assert not stage.experience.given_back


async def test_progress_is_sent_at_every_flush(staged: Any, until: Any, assign: Any) -> None:
    stage = await staged(flush_s=0.1)
    rollout, progress = stage.rollouts[0], stage.experience.progress
    rollout.speak, rollout.single = says(lambda position: 5), True
    await stage.open()
    stage.experience.give([assign(size=1)])
    for count in (1, 2, 3):
        await until(lambda count=count: len(progress) >= count)
        rollout.frozen.set()
    assert [len(p.transcripts[0].logprobs) for p in progress[:3]] == [1, 2, 3]
    stage.resume()
    await until(lambda: stage.experience.trajectories)


async def test_tokens_of_a_short_turn_are_saved_later(staged: Any, until: Any, assign: Any) -> None:
    stage = await staged(flush_s=60.0)
    stage.rewards[0].pause_s = 2.0
    service, progress = await stage.open(), stage.experience.progress
    stage.experience.give([assign(size=1)])
    await until(lambda: stage.rewards[0].num_calls)
    now = time.monotonic()
    for passed_s in (0.0, 61.0, 8 * 60.0 - 1.0):
        service.worker.maintain(now + passed_s)
    await asyncio.sleep(0.1)
    assert progress == []  # they took less than a minute to sample
    service.worker.maintain(now + 8 * 60.0 + 1.0)
    await until(lambda: progress)
    await until(lambda: stage.experience.trajectories)
    assert len(progress) == 1


async def test_tokens_of_a_long_turn_are_saved_at_once(
    staged: Any, until: Any, assign: Any
) -> None:
    stage = await staged(flush_s=60.0)
    rollout, progress = stage.rollouts[0], stage.experience.progress
    rollout.single = True
    service = await stage.open()
    stage.experience.give([assign(size=1)])
    await until(lambda: rollout.requests and not rollout.frozen.is_set())
    now = time.monotonic()
    for passed_s in (0.0, 59.0):
        service.worker.maintain(now + passed_s)
    await asyncio.sleep(0.1)
    assert progress == []
    # Again until the first token has arrived.
    await until(lambda: service.worker.maintain(time.monotonic() + 61.0) or progress)
    assert len(progress[0].transcripts[0].logprobs) == 1
    stage.resume()
    await until(lambda: stage.experience.trajectories)


async def test_what_only_waits_for_its_score_says_so(staged: Any, until: Any, assign: Any) -> None:
    """An evaluation holds rollout workers until then."""
    stage = await staged(flush_s=0.1)
    stage.rewards[0].pause_s = 1.0
    await stage.open()
    stage.experience.give([assign(size=1, purpose=Purpose.EVAL)])
    await until(lambda: stage.experience.trajectories)
    assert [progress.sampled for progress in stage.experience.progress].count(True) == 1
    made = stage.experience.trajectories["g0", 0].transcripts[0]
    assert tuple(stage.experience.progress[-1].transcripts[0].tokens) == made.tokens


async def test_each_evaluation_has_its_own_options(staged: Any, until: Any, assign: Any) -> None:
    evals = {"a": {"temperature": 0.25}, "b": {"temperature": 0.5}}
    stage = await staged(spec={"evals": evals})
    await stage.open()
    stage.experience.give(
        [
            assign(f"g-{name}", size=2, seed=index, purpose=Purpose.EVAL, eval_set=name)
            for index, name in enumerate(evals)
        ]
    )
    await until(lambda: len(stage.experience.trajectories) == 4)
    sampled = [request.sampling for request in stage.rollouts[0].requests]
    assert sorted(each.temperature for each in sampled) == [0.25, 0.25, 0.5, 0.5]
    assert len({each.seed for each in sampled}) == 4


async def test_leases_are_renewed(staged: Any, until: Any, assign: Any) -> None:
    stage = await staged(flush_s=0.1)
    stage.rollouts[0].frozen.clear()
    await stage.open()
    stage.experience.give([assign(size=2, lease_s=0.3)])
    await until(lambda: len(stage.experience.renewed) >= 6)
    assert {key.index for key in stage.experience.renewed} == {0, 1}


async def test_drain_gives_back_with_progress(staged: Any, until: Any, assign: Any) -> None:
    stage = await staged(flush_s=0.1)
    rollout, progress = stage.rollouts[0], stage.experience.progress
    rollout.speak, rollout.single = says(lambda position: 5), True
    rollout.frozen.clear()
    service = await stage.open()
    stage.experience.give([assign(size=2)])
    await until(lambda: len(rollout.requests) == 2)
    rollout.frozen.set()
    await until(lambda: len(progress) == 2)  # it has the tokens
    progress.clear()
    await service.drain()
    await until(lambda: len(stage.experience.given_back) == 2)
    assert [key.reason for key in stage.experience.given_back] == [
        pb.GIVE_BACK_REASON_DRAIN,
        pb.GIVE_BACK_REASON_DRAIN,
    ]
    assert sorted(p.index for p in progress) == [0, 1]
    assert all(p.transcripts[0].logprobs for p in progress)
    assert service.worker.num_open == 0


async def test_an_unfinished_turn_is_resumed(staged: Any, until: Any, assign: Any) -> None:
    stage = await staged()
    await stage.open()
    stage.experience.give([assign(size=1)])
    await until(lambda: stage.experience.trajectories)
    whole = stage.experience.trajectories["g0", 0]
    said = whole.transcripts[0]
    half = Transcript(
        said.tokens[:7],
        (said.spans[0], TokenSpan(6, 7, TokenSource.POLICY)),
        (-9.0,),
        (VersionRun(5, 1),),
    )
    progress = EpisodeProgress("g0", 0, 1, (half,))
    stage.experience.trajectories.clear()
    stage.experience.give([assign(size=1, attempts=(2,), progress=(progress,))])
    await until(lambda: stage.experience.trajectories)
    resumed = stage.experience.trajectories["g0", 0]
    assert resumed.transcripts[0].tokens == said.tokens
    assert resumed.transcripts[0].logprobs[0] == -9.0
    assert resumed.transcripts[0].versions[0] == VersionRun(5, 1)


@pytest.mark.parametrize("cut", [4, 5, 6, 7, 8, 9, 10, 13])
async def test_a_dialogue_is_resumed_by_its_actions(
    staged: Any, until: Any, assign: Any, cut: int
) -> None:
    """Wherever a dialogue was interrupted, it ends as if it had not been."""
    stage = await staged(spec={"tasks": TALKING, "sampling": WIDE}, chat=True)
    stage.rollouts[0].speak = says(lambda position: EOS if position % 3 == 0 else 5)
    await stage.open()
    stage.experience.give([assign(size=1)])
    await until(lambda: stage.experience.trajectories)
    whole = stage.experience.trajectories["g0", 0].transcripts[0]
    stage.experience.trajectories.clear()
    progress = cut_off(whole, cut)
    stage.experience.give([assign(size=1, attempts=(2,), progress=(progress,))])
    await until(lambda: stage.experience.trajectories)
    resumed = stage.experience.trajectories["g0", 0]
    assert resumed.transcripts[0] == whole
    assert resumed.environment_reward == 3.0


def cut_off(whole: Transcript, policy_tokens_from: int) -> EpisodeProgress:
    """Progress that ends inside or right after a policy turn."""
    turns = [span for span in whole.spans if span.source is TokenSource.POLICY]
    cut = max(policy_tokens_from, turns[0].start)
    if not any(turn.start < cut <= turn.end for turn in turns):
        cut = next(turn.start for turn in turns if turn.start >= cut)  # shown whole or not at all
    inside = [s for s in whole.spans if s.start < cut]
    spans = tuple(TokenSpan(s.start, min(s.end, cut), s.source) for s in inside)
    count = sum(s.end - s.start for s in spans if s.source is TokenSource.POLICY)
    done = [t for t in turns if t.end <= cut]
    return EpisodeProgress(
        "g0",
        0,
        1,
        (
            Transcript(
                whole.tokens[:cut],
                spans,
                whole.logprobs[:count],
                (VersionRun(0, count, "rollout-0"),) if count else (),
                tuple(s for s in whole.steps if s.end < cut),
            ),
        ),
        tuple("5" for _ in done),
    )


async def test_an_environment_that_cannot_be_replayed_restarts(
    staged: Any, until: Any, assign: Any
) -> None:
    tasks = {**TALKING, "options": {"replayable": False}}
    stage = await staged(spec={"tasks": tasks, "sampling": WIDE}, chat=True)
    service = await stage.open()
    spans = (TokenSpan(0, 2, TokenSource.TEMPLATE), TokenSpan(2, 3, TokenSource.POLICY))
    half = Transcript((1, 2, 5), spans, (-9.0,), (VersionRun(0, 1),))
    stage.experience.give([assign(size=1, progress=(EpisodeProgress("g0", 0, 0, (half,)),))])
    await until(lambda: stage.experience.trajectories)
    (trajectory,) = stage.experience.trajectories.values()
    assert -9.0 not in trajectory.transcripts[0].logprobs
    assert (service.stages.restarted, service.stages.tokens_lost) == (1, 1)


async def test_eval_episodes_are_greedy_and_pinned(staged: Any, until: Any, assign: Any) -> None:
    stage = await staged(spec={"eval": {"temperature": 0.0}})
    stage.rollouts[0].version = 3
    await stage.open()
    stage.experience.give([assign(size=1, purpose=Purpose.EVAL, pinned_version=3)])
    await until(lambda: stage.experience.trajectories)
    request = stage.rollouts[0].requests[0]
    assert (request.pinned_version, request.sampling.temperature) == (3, 0.0)
    assert stage.experience.trajectories["g0", 0].purpose is Purpose.EVAL


@pytest.mark.parametrize("known", [True, False])
async def test_a_version_that_is_gone(staged: Any, until: Any, assign: Any, known: bool) -> None:
    stage = await staged()
    stage.rollouts[0].gone = True
    stage.rollouts[0].version = 4 if known else 3
    await stage.open()
    stage.experience.give([assign(size=1, purpose=Purpose.EVAL, pinned_version=3)])
    await until(lambda: stage.experience.given_back)
    assert stage.experience.given_back[0].reason == pb.GIVE_BACK_REASON_VERSION_GONE


async def test_credits_are_slots(staged: Any, until: Any, assign: Any) -> None:
    stage = await staged(slots=4)
    stage.rollouts[0].frozen.clear()
    service = await stage.open()
    stage.experience.give([assign(f"g{i}", 2) for i in range(6)])
    await until(lambda: service.worker.num_open == 4)
    await asyncio.sleep(0.1)
    assert service.worker.num_open == 4
    stage.rollouts[0].frozen.set()
    await until(lambda: len(stage.experience.trajectories) == 12)


async def test_status_and_load(staged: Any, until: Any, assign: Any) -> None:
    stage = await staged()
    stage.rollouts[0].frozen.clear()
    service = await stage.open()
    stage.experience.give([assign(size=3)])
    await until(lambda: len(stage.rollouts[0].requests) == 3)
    async with connect(service.report().endpoint) as channel:
        status = await EnvironmentStub(channel).Status(environment_pb2.EnvironmentStatusRequest())
    assert status.open_episodes == status.waiting_for["generate"] == 3
    load = service.report().load
    assert load["waiting_generate"] == 3
    assert {"open", "slots", "waiting_step", "waiting_score", "waiting_submit"} <= load.keys()
    assert {"finished", "infra_errors", "busy_s", "cpu_s"} <= load.keys()


async def test_a_job_with_an_unknown_environment_is_invalid(
    staged: Any, until: Any, assign: Any
) -> None:
    stage = await staged(spec={"tasks": {"environment": "nowhere"}})
    await stage.open()
    stage.experience.give([assign(size=2)])
    await until(lambda: len(stage.experience.given_back) == 2)
    key = stage.experience.given_back[0]
    assert key.reason == pb.GIVE_BACK_REASON_INVALID
    assert "'nowhere' is not installed" in key.detail
