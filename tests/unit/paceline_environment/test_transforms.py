"""Prompts that a job's transform changes, from reset to submission."""

from __future__ import annotations

import json
from typing import Any

import pytest

import paceline_test_transforming as transforming
from paceline.enums import Purpose, TokenSource
from paceline.platform import wire
from paceline.types import EpisodeProgress, EpisodeStart, Task, Trajectory, Transcript
from paceline.v1 import experience_pb2
from paceline_environment.variants import with_prompt

EOS = 1
PLAIN = "12+34="
SHORT: dict[str, Any] = {"max_tokens": 8, "max_context": 64, "on_truncation": "score"}


def spec(environment: str = "arithmetic", **transform: Any) -> dict[str, Any]:
    tasks = {"environment": environment, "transform": {"kind": "prefixed", **transform}}
    return {"tasks": tasks, "sampling": {**SHORT, "max_context": 256}}


@pytest.fixture(autouse=True)
def calls() -> list[tuple[int, str]]:
    transforming.CALLS.clear()
    return transforming.CALLS


async def ran(stage: Any, until: Any, assignment: Any) -> list[Trajectory]:
    told = stage.experience
    told.give([assignment])
    keys = [(assignment.group_id, index) for index in assignment.indices]
    await until(lambda: all(key in told.trajectories for key in keys))
    return [told.trajectories[key] for key in keys]


def prompt_of(transcript: Transcript) -> tuple[int, ...]:
    first = next(s.start for s in transcript.spans if s.source is TokenSource.POLICY)
    return transcript.tokens[:first]


def sampled(transcript: Transcript) -> tuple[tuple[int, ...], tuple[float, ...], Any]:
    spans = [s for s in transcript.spans if s.source is TokenSource.POLICY]
    tokens = tuple(t for s in spans for t in transcript.tokens[s.start : s.end])
    return tokens, transcript.logprobs, transcript.versions


async def test_a_group_is_transformed_once_for_each_start(
    staged: Any, until: Any, assign: Any, calls: list[tuple[int, str]]
) -> None:
    stage = await staged(spec=spec())
    await stage.open()
    plain = await ran(stage, until, assign(size=4))
    assert calls == [(7, "")]
    assert {each.provenance.prompt_variant for each in plain} == {"h-"}
    calls.clear()
    other = Task("other", "arithmetic", json.dumps({"question": "1+1=", "answer": "2"}))
    starts = (
        EpisodeStart("qq", '{"a": 1}', tasks=(0,)),
        EpisodeStart(),
        EpisodeStart("qq", '{"a": 1}', tasks=(0,)),
    )
    first, second, third = await ran(
        stage, until, assign("g1", size=3, starts=starts, tasks=(other,))
    )
    assert sorted(calls) == [(7, ""), (7, "qq")]
    assert first.provenance.prompt_variant == third.provenance.prompt_variant == "h-qq"
    meta = json.loads(first.provenance.variant_meta)
    assert meta == {"a": 1, "prefix": "hqq", "tasks": ["other"]}
    lengths = [len(prompt_of(each.transcripts[0])) for each in (first, second, third)]
    assert lengths == [len("hqq" + PLAIN), len("h" + PLAIN), len("hqq" + PLAIN)]
    assert not first.transcripts[0].original_prompt


async def test_rewards_are_told_the_variant(staged: Any, until: Any, assign: Any) -> None:
    stage = await staged(spec=spec())
    await stage.open()
    await ran(stage, until, assign(size=2))
    items = [item for reward in stage.rewards for item in reward.items]
    assert [item.variant for item in items] == ["h-", "h-"]
    assert json.loads(items[0].variant_meta) == {"prefix": "h", "tasks": []}


@pytest.mark.parametrize("environment", ["arithmetic", "talking"])
async def test_what_was_sampled_is_submitted_under_the_original_prompt(
    staged: Any, until: Any, assign: Any, environment: str
) -> None:
    """With the policy's tokens, log-probs and versions as they were, also those of later turns."""
    plain = await staged(
        spec={"tasks": {"environment": environment}, "sampling": {**SHORT, "max_context": 256}},
        chat=True,
    )
    await plain.open()
    (untouched,) = await ran(plain, until, assign(size=1))
    found: list[Trajectory] = []
    for train_as in ("sampled", "original"):
        stage = await staged(spec=spec(environment, prefix="hg", train_as=train_as), chat=True)
        await stage.open()
        found += await ran(stage, until, assign(size=1))
    as_sampled, as_original = (each.transcripts[0] for each in found)
    assert sampled(as_original) == sampled(as_sampled)
    assert prompt_of(as_original) == prompt_of(untouched.transcripts[0])
    assert len(prompt_of(as_sampled)) == len(prompt_of(as_original)) + 2
    assert (as_original.original_prompt, as_sampled.original_prompt) == (True, False)
    assert as_original.spans[-1].end == len(as_original.tokens)
    assert [(s.start + 2, s.end + 2, s.reward) for s in as_original.steps] == [
        (s.start, s.end, s.reward) for s in as_sampled.steps
    ]
    assert found[0].provenance.prompt_variant == found[1].provenance.prompt_variant == "hg-"


def test_a_prompt_that_is_the_same_is_not_marked() -> None:
    builder_spans = Transcript((5, 6), (), (), ())
    assert with_prompt(builder_spans, builder_spans) is builder_spans


async def test_an_episode_that_moves_keeps_its_variant(
    staged: Any, until: Any, assign: Any
) -> None:
    """It is recalled in its first turn; another worker ends it as it would have ended."""
    stages = [await staged(spec=spec("talking"), chat=True) for _ in range(3)]
    for stage in stages:
        stage.rollouts[0].speak = every_third_ends
    left, right, whole = stages
    (expected,) = await opened(whole, until, assign(size=1))
    left.rollouts[0].single = True
    left.rollouts[0].frozen.clear()
    service = await left.open()
    left.experience.give([assign(size=1)])
    await until(lambda: left.rollouts[0].requests)
    left.rollouts[0].frozen.set()
    await until(lambda: all(e.episode.num_sampled for e in service.worker._open.values()))
    drain = experience_pb2.GIVE_BACK_REASON_DRAIN
    left.experience.abort(
        experience_pb2.EpisodeKey(job_id="job", group_id="g0", attempt=1, reason=drain)
    )
    await until(lambda: left.experience.given_back)
    progress = wire.from_proto(left.experience.progress[-1], EpisodeProgress)
    assert 0 < progress.transcripts[0].num_policy_tokens < expected.num_policy_tokens
    again = assign(size=1, attempts=(2,), progress=(progress,))
    (found,) = await opened(right, until, again)
    assert found.transcripts == expected.transcripts
    assert found.provenance.prompt_variant == expected.provenance.prompt_variant == "h-"
    assert found.provenance.variant_meta == expected.provenance.variant_meta


async def opened(stage: Any, until: Any, assignment: Any) -> list[Trajectory]:
    await stage.open()
    return await ran(stage, until, assignment)


def every_third_ends(seed: int, position: int) -> int:
    del seed
    return EOS if position % 3 == 0 else 5


async def test_evaluation_says_so(staged: Any, until: Any, assign: Any) -> None:
    tasks = {
        "environment": "arithmetic",
        "transform": {
            "kind": "prompt_augmentation",
            "templates": [
                {"name": "a", "text": "h{question}"},
                {"name": "b", "text": "g{question}"},
            ],
            "evaluation": "b",
        },
    }
    stage = await staged(spec={"tasks": tasks, "eval": {"tasks": 1}})
    await stage.open()
    drawn: set[str] = set()
    for seed in range(8):
        group = await ran(
            stage,
            until,
            assign(f"e{seed}", size=2, seed=seed, purpose=Purpose.EVAL, pinned_version=-1),
        )
        assert {each.provenance.prompt_variant for each in group} == {"b"}
        group = await ran(stage, until, assign(f"t{seed}", size=2, seed=seed))
        names = {each.provenance.prompt_variant for each in group}
        assert len(names) == 1  # a group never mixes templates
        drawn |= names
    assert drawn == {"a", "b"}


@pytest.mark.parametrize(
    ("deed", "reason", "detail"),
    [
        ("raise", "INVALID", "tasks.transform: faulty: ZeroDivisionError: no prompt today"),
        ("unreachable", "INFRA_ERROR", "tasks.transform: faulty: the index is down"),
        (
            "large",
            "INVALID",
            "tasks.transform: faulty: a variant has 2034 bytes; at most 1024 are allowed",
        ),
        ("empty", "INVALID", "tasks.transform: faulty: it returned an empty prompt"),
        ("other", "INVALID", "tasks.transform: faulty: it returned Observation; Variant is needed"),
        (
            "hang",
            "INFRA_ERROR",
            "tasks.transform: faulty took more than 0.2 s (tasks.step_timeout_s)",
        ),
    ],
)
async def test_a_transform_that_fails_is_named(
    staged: Any, until: Any, assign: Any, deed: str, reason: str, detail: str
) -> None:
    tasks = {
        "environment": "arithmetic",
        "transform": {"kind": "faulty", "deed": deed},
        "step_timeout_s": 0.2,
    }
    stage = await staged(spec={"tasks": tasks})
    await stage.open()
    told = stage.experience
    told.give([assign(size=2)])
    await until(lambda: len(told.given_back) == 2)
    number = getattr(experience_pb2, f"GIVE_BACK_REASON_{reason}")
    assert {(key.reason, key.detail) for key in told.given_back} == {(number, detail)}
