"""Prompt augmentation and XRPO's in-context seeds, on worked examples."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import parse_job
from paceline.config.named import problems
from paceline.enums import Purpose, ScoreStatus
from paceline.methods.prompt_augmentation.templates import BEGUN, FREE, TAGGED, TEMPLATES
from paceline.methods.prompt_augmentation.transform import prompt_augmentation
from paceline.methods.xrpo.corpus import remembered
from paceline.methods.xrpo.corpus import seeded as seeded_wave
from paceline.methods.xrpo.transform import xrpo_seeds
from paceline.plugins import (
    MAX_NAMED_TASKS,
    MAX_PICK_BYTES,
    GroupOutcome,
    Message,
    Observation,
    RewardInput,
    Start,
    Variant,
)
from paceline.rewards.template import template_answer, template_format
from paceline.testing.transforms import context, task

ASKED = Observation((Message("system", "Be kind."), Message("user", "12+34=")), text="12+34=")
BY_NAME = {each.name: each for each in TEMPLATES}


def drawn(seed: int, **more: Any) -> Variant:
    options = more.pop("options", {})
    return asyncio.run(prompt_augmentation(ASKED, context(seed=seed, **more), **options))


def answered(template: str, response: str) -> RewardInput:
    found = BY_NAME[template]
    meta = {"tags": list(found.tags), "answer": found.answer}
    return RewardInput("g/0", task("12+34=", "46"), response, variant=template, variant_meta=meta)


def test_there_are_thirteen_templates_of_three_kinds() -> None:
    assert (len(TAGGED), len(BEGUN), len(FREE), len(BY_NAME)) == (6, 3, 4, 13)
    assert {len(each.tags) for each in TAGGED} == {4}
    assert {len(each.tags) for each in BEGUN} == {3}
    assert {len(each.tags) for each in FREE} == {0}
    for each in BEGUN:  # the response continues after the tag that the prompt has opened
        opened = each.text.rpartition("\n")[2]
        assert each.tags[0] == opened.replace("<", "</")


def test_one_template_for_each_group_uniformly() -> None:
    names = Counter(drawn(seed).name for seed in range(1300))
    assert names.keys() == BY_NAME.keys()
    assert 60 < min(names.values()) <= max(names.values()) < 145
    assert drawn(5) == drawn(5, variant="other", meta={"a": 1})


def test_the_question_is_asked_inside_of_the_template() -> None:
    found = drawn(3)
    system, user = found.messages
    assert system == ASKED.messages[0]
    assert user.content == found.text == BY_NAME[found.name].text.replace("{question}", "12+34=")


def test_evaluation_has_one_fixed_template() -> None:
    evals = {drawn(seed, purpose=Purpose.EVAL).name for seed in range(40)}
    assert evals == {"tags"}
    options = {"templates": ["plain", "boxed"], "evaluation": "boxed"}
    evals = {drawn(seed, purpose=Purpose.EVAL, options=options).name for seed in range(40)}
    assert evals == {"boxed"}
    assert {drawn(seed, options=options).name for seed in range(40)} == {"plain", "boxed"}


@pytest.mark.parametrize(
    ("template", "response", "reward"),
    [
        ("tags", "<think>a</think><answer>46</answer>", 1.0),
        ("tags", "<think>a</think><answer>46", 0.75),  # three of four tags
        ("tags", "<think>a</think>46", 0.5),
        ("tags", "<think>a<think>b</think><answer>46</answer>", 0.75),  # one occurs twice
        ("tags", "46", 0.0),
        ("reasoning", "<think>a</think><answer>46</answer>", 0.0),  # the tags of another one
        ("begun", "a</think><answer>46</answer>", 1.0),
        ("begun", "a</think>46", 1 / 3),
        ("plain", "<think>", 1.0),
        ("boxed", "", 1.0),
    ],
)
def test_the_format_is_that_of_the_template(template: str, response: str, reward: float) -> None:
    assert template_format(answered(template, response)) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("template", "response", "reward"),
    [
        ("tags", "<think>45</think><answer> 46 </answer>", 1.0),
        ("tags", "<answer>1</answer><answer>46</answer>", 1.0),  # the last one
        ("tags", "46", None),
        ("begun_reasoning", "so</reasoning><solution>46</solution>", 1.0),
        ("boxed", r"\boxed{1} and then \boxed{46}.", 1.0),
        ("boxed", "46", None),
        ("last_line", "12+34 is\nAnswer: 46\n", 1.0),
        ("last_line", "46\nAnswer: 47", 0.0),
        ("plain", " 46 ", 1.0),
    ],
)
def test_the_answer_is_where_the_template_asks_for_it(
    template: str, response: str, reward: float | None
) -> None:
    found = template_answer(answered(template, response))
    assert found.reward == (reward or 0.0)
    assert (found.status is ScoreStatus.PARSE_ERROR) == (reward is None)


def job(**tasks: Any) -> dict[str, Any]:
    return {
        "name": "any",
        "model": {"path": "any"},
        "tasks": {"environment": "arithmetic", **tasks},
        "reward": [{"kind": "template_answer"}],
    }


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"templates": ["tag"]}, "template 'tag' is unknown; known: tags, tags_first"),
        ({"templates": ["tags", "tags"]}, "two templates are named 'tags'"),
        ({"evaluation": "mine"}, "evaluation 'mine' is not among the templates"),
        ({"templates": [{"name": "a", "text": "?"}]}, "has {question} 0 times"),
        (
            {"templates": [{"name": "a", "text": "{question}", "answer": "tags"}]},
            "an answer between tags needs two `tags` at least",
        ),
        ({"bogus": 1}, "unknown option of 'prompt_augmentation'"),
    ],
)
def test_wrong_options_are_refused_at_submit(options: dict[str, Any], line: str) -> None:
    spec = parse_job(job(transform={"kind": "prompt_augmentation", **options}))
    found = list(problems(spec))
    assert all(each.startswith("tasks.transform") for each in found)
    assert any(line in each for each in found)


def test_a_reward_of_templates_needs_a_transform() -> None:
    (line,) = problems(parse_job(job()))
    assert line.startswith("tasks.transform: null with reward 'template_answer'")
    assert not list(problems(parse_job(job(transform="prompt_augmentation"))))


SOLVED = [task("90-1=", "89"), task("12+35=", "47"), task("1+34=", "35"), task("12+34=", "46")]


def seeded(**options: Any) -> Variant:
    given = context(variant="seeded", meta={"answers": ["89", "47", "35", "46"]}, tasks=SOLVED)
    return asyncio.run(xrpo_seeds(ASKED, given, **options))


def test_the_most_similar_solved_tasks_come_first_without_the_task_itself() -> None:
    found = seeded()
    shown = "Question: 1+34=\nAnswer: 35\n\nQuestion: 12+35=\nAnswer: 47\n\n12+34="
    assert found.messages[1].content == found.text == shown
    assert (found.name, found.train_as) == ("seeded", "sampled")
    assert found.meta == {"examples": ["task 1+34=", "task 12+35="]}


def test_seeds_follow_their_options() -> None:
    found = seeded(examples=1, example="{question}{answer} ", max_chars=4, train_as="original")
    assert (found.text, found.train_as) == ("12+3" + "47 " + "12+34=", "original")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (context(variant="seeded"), "zero_shot"),  # nothing is solved yet
        (context(variant="seeded", meta={"answers": ["46"]}, tasks=SOLVED[3:]), "zero_shot"),
        (context(), ""),  # the first wave
        (
            context(variant="seeded", meta={"answers": ["1"]}, tasks=SOLVED, purpose=Purpose.EVAL),
            "",
        ),
    ],
)
def test_without_solved_tasks_the_prompt_stays_as_it_is(given: Any, name: str) -> None:
    found = asyncio.run(xrpo_seeds(ASKED, given))
    assert (found.messages, found.text, found.name) == (ASKED.messages, ASKED.text, name)


def outcome(number: int, rewards: tuple[float, ...], answers: tuple[str, ...]) -> GroupOutcome:
    return GroupOutcome(number, rewards, answers)


def test_the_corpus_has_the_best_answers_to_the_tasks_that_were_solved_last() -> None:
    first = [outcome(3, (0.0, 0.7, 1.0), ("1", "2", "3")), outcome(4, (0.5,), ("9",))]
    memory = remembered({}, first)
    assert memory == {"solved": [[3, "3"]]}
    memory = remembered(memory, [outcome(5, (1.0,), ("5",)), outcome(3, (1.0,), ("33",))])
    assert memory == {"solved": [[5, "5"], [3, "33"]]}
    (start, again) = seeded_wave(memory, 2)
    assert start == again == Start("seeded", tasks=(5, 3), meta={"answers": ["5", "33"]})
    assert seeded_wave({}, 1) == (Start("seeded"),)


@given(st.lists(st.tuples(st.integers(0, 40), st.text(max_size=256)), max_size=60))
def test_a_wave_always_has_room_for_the_corpus(solved: list[tuple[int, str]]) -> None:
    memory: dict[str, Any] = {}
    for number, answer in solved:
        memory = remembered(memory, [outcome(number, (1.0,), (answer,))])
        memory = json.loads(json.dumps(memory))
    (start,) = seeded_wave(memory, 1)
    assert len(start.tasks) == len(start.meta.get("answers", ())) <= MAX_NAMED_TASKS
    assert len(json.dumps({"variant": start.variant, "meta": dict(start.meta)})) <= MAX_PICK_BYTES
    newest = [(number, answer) for number, answer in solved if answer][-1:]
    if newest and len(json.dumps(newest[0][1])) < 700:
        assert (start.tasks[-1], start.meta["answers"][-1]) == newest[0]


def test_a_variant_takes_little_room() -> None:
    for each in TEMPLATES:
        told = {"variant": each.name, "meta": {"tags": each.tags, "answer": each.answer}}
        assert len(json.dumps(told)) < 256
