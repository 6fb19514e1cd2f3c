"""Recipes of evidence `code`: what they sample, keep and reward, by their releases and by ours."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from paceline.config import resolve_job
from paceline.config.base import PluginSpec
from paceline.config.job import JobSpec
from paceline.config.recipes import recipe
from paceline.plugins import (
    Context,
    Drop,
    FinishedEpisode,
    FinishedGroup,
    Message,
    Observation,
    OpenGroup,
    Pick,
    RewardInput,
    RewardTurn,
    Start,
    Stored,
    registry,
)
from paceline.testing.filters import finished_group
from paceline.testing.transforms import context, task

JOB: dict[str, Any] = {
    "name": "a",
    "model": {"path": "models/tiny"},
    "tasks": {"environment": "arithmetic"},
    "reward": ["template_answer"],
}
AT = Context(step=3, total_steps=9)
GENERATE = ("sampler", "allocator", "filters", "replay")
TESTED = {"dapo", "dars", "dars_b", "dart", "prompt_augmentation"}


def test_each_recipe_that_decides_is_tested() -> None:
    found: set[str] = set()
    for name in registry.installed("recipes"):
        fragment = recipe(name).fragment()
        experience, tasks = fragment.get("experience", {}), fragment.get("tasks", {})
        decides = any(experience.get(field) for field in GENERATE)
        if recipe(name).method.evidence == "code" and (
            decides or "reward" in fragment or "transform" in tasks
        ):
            found.add(name)
    assert found == TESTED


def job(name: str) -> JobSpec:
    raw = JOB | {"recipe": name}
    return resolve_job(raw if name == "prompt_augmentation" else raw | {"reward": ["exact"]})


def made(kind: str, part: PluginSpec | None, *given: Any, **more: Any) -> Any:
    assert part is not None
    return registry.installed(kind)[part.kind].load()(*given, **more, **part.options)


def drops(spec: JobSpec, group: FinishedGroup) -> bool:
    return any(
        isinstance(made("filters", part, group), Drop) for part in spec.experience.filters or ()
    )


@pytest.mark.parametrize("accuracies", list(product([0.0, 1.0], repeat=3)), ids=str)
@pytest.mark.parametrize("penalties", [(0.0, 0.0, 0.0), (0.0, -0.5, 0.0)], ids=str)
def test_dapo_keeps_groups_by_their_accuracy(
    accuracies: Sequence[float], penalties: Sequence[float]
) -> None:
    """verl-recipe@48ea0a7 dapo/dapo_ray_trainer.py: std of `acc` > 0, or a single episode."""
    rewards = [a + p for a, p in zip(accuracies, penalties, strict=True)]
    group = finished_group(rewards, parts={"exact": accuracies, "overlong": penalties})
    assert drops(job("dapo"), group) == (len(set(accuracies)) == 1)
    assert not drops(job("dapo"), finished_group([1.0], parts={"exact": [1.0], "overlong": [0.0]}))


@pytest.mark.parametrize("length", [1, 16383, 16384, 16385, 18000, 20480])
def test_dapo_penalises_long_answers(length: int) -> None:
    """verl@1dda039 workers/reward_manager/dapo.py: 4096 of 20480 tokens, factor 1."""
    [part] = [each for each in job("dapo").reward if each.kind == "overlong"]
    turns = (RewardTurn("x", num_tokens=length),)
    item = RewardInput("a", task("1+1=", "2"), "x", turns=turns, max_tokens=20480)
    found = registry.installed("rewards")["overlong"].load()(item, **part.options)
    expected = min(-(length - (20480 - 4096)) / 4096, 0.0)
    assert part.weight * found == pytest.approx(expected)


@pytest.mark.parametrize("solved", range(9))
@pytest.mark.parametrize("name", ["dars", "dars_b"])
def test_dars_begins_second_waves(name: str, solved: int) -> None:
    """yangzhch6/DARS@9b21b71 ray_dars_trainer.py schedule_HW (n 8, n_max 64) and its filter."""
    spec = job(name)
    rewards = [1.0] * solved + [0.0] * (8 - solved)
    episodes = tuple(FinishedEpisode(i, Start(), each) for i, each in enumerate(rewards))
    dars = made("allocators", spec.experience.allocator, group_size=spec.experience.group_size)
    dars.remember({})
    assert len(dars.start(Pick(3), AT)) == 8
    acc = solved / 8 if solved else 0.5 / 8
    each = 2 * acc * (1 - acc)
    wanted = 0 if acc >= 0.5 else math.ceil((2 * (1 - acc) * 0.5 * 8 - 8 * each) / each)
    assert len(dars.more(OpenGroup(Pick(3), episodes), AT)) == min(wanted, 64 - 8)
    assert drops(spec, finished_group(rewards)) == (not 0 < solved < 8)


@pytest.mark.parametrize("solved", range(9))
def test_dart_begins_fewer_episodes_of_easy_tasks(solved: int) -> None:
    """Computer-use-agents/dart_rollouter@92ccb48 task_loader.py get_dynamic_rollout_n."""
    spec = job("dart")
    dart = made("allocators", spec.experience.allocator, group_size=spec.experience.group_size)
    dart.remember({"3": [[1.0] * solved + [0.0] * (8 - solved), 70]})
    rate = solved / 8
    expected = 8 if rate < 0.6 else max(2, int(9 / rate - 7))
    starts = dart.start(Pick(3), AT)
    assert len(starts) == expected
    assert all(each == Start() for each in starts)  # none is limited
    assert len(dart.start(Pick(4), AT)) == 8


@pytest.mark.parametrize("seed", range(6))
def test_dart_takes_new_tasks_first_and_then_the_weakest(seed: int) -> None:
    """The same file, sort_tasks_by_success_rate; ours compares the tasks of a window of 8."""
    chance = random.Random(seed)
    rates = [None if chance.random() < 0.1 else chance.randint(0, 4) / 4 for _ in range(8)]
    order = made("samplers", job("dart").experience.sampler, 8, seed=seed, epochs=4)
    order.remember({str(i): [rate] * 4 for i, rate in enumerate(rates) if rate is not None})
    keys = [(-1, 0.0) if rate is None else (0, rate) for rate in rates]
    assert keys[order.next()] == min(keys)


@pytest.mark.parametrize("rewards", [[1.0] * 11, [0.0] * 9 + [1.0], [1.0] * 8 + [0.0], [0.0] * 8])
def test_dart_trains_both_kinds(rewards: list[float]) -> None:
    """dart-gui@e0e606d verl/utils/dataset/trainable_filter.py filter_fn; ours does not draw."""
    spec = job("dart")
    balanced, *others = list(spec.experience.filters or ())
    group = finished_group(rewards)
    kept = [rewards[i] for i in made("filters", balanced, group).of(len(rewards))]
    assert len(kept) == min(len(rewards), 8)
    assert set(kept) == set(rewards)
    dropped = [isinstance(made("filters", each, finished_group(kept)), Drop) for each in others]
    assert dropped == [len(set(rewards)) == 1]


def test_dart_brings_a_success_back() -> None:
    """The same function: the newest success takes the place of the oldest of only failures."""
    pool = made("replays", job("dart").experience.replay)
    assert list(pool.keep(finished_group([0.0, 1.0, 1.0, 0.0]), AT)) == [1, 2]
    stored = [Stored(1.0, step=1), Stored(1.0, step=2)]
    [guest] = pool.offer(finished_group([0.0] * 8), stored, AT)
    assert (guest.stored, guest.replaces) == (1, 0)
    assert not pool.offer(finished_group([0.0] * 7 + [1.0]), stored, AT)


ASKED = Observation((Message("user", "12+34="),), text="12+34=")


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline", "gdpo", "ui_s1", "mssr"])
def test_groups_of_equal_rewards_stay_where_they_have_advantages(name: str) -> None:
    """None of their releases drops them; `zero_variance` is what a job has without a word."""
    raw = JOB | {"recipe": name, "reward": ["exact"]}
    assert drops(resolve_job(raw | {"recipe": "grpo"}), finished_group([1.0, 1.0]))
    assert not drops(resolve_job(raw), finished_group([1.0, 1.0]))


TAGGED = "<think>a</think><answer>46</answer>"


@pytest.mark.parametrize(
    ("template", "response", "accuracy", "shape"),
    [
        ("tags", TAGGED, 1.0, 1.0),
        ("tags", TAGGED.replace("<think>", ""), 1.0, 0.75),
        ("tags", TAGGED.replace("46", "45"), 0.0, 1.0),
        ("begun", TAGGED.removeprefix("<think>"), 1.0, 1.0),
        ("begun", "a</think>45", 0.0, 1 / 3),
        ("plain", "45", 0.0, 1.0),
    ],
)
def test_prompt_augmentation_adds_format_and_accuracy(
    template: str, response: str, accuracy: float, shape: float
) -> None:
    """wenquanlu/prompt-augmentation-GRPO@ff1ded4 format_reward.py (.25 for each of four tags, a
    third of three, 1 without any), added to 1 or 0 in math_verify_timeout.py compute_score."""
    spec = job("prompt_augmentation")
    seeds = (context(seed=seed) for seed in range(99))
    variants = (asyncio.run(made("transforms", spec.tasks.transform, ASKED, c)) for c in seeds)
    variant = next(each for each in variants if each.name == template)
    item = RewardInput(
        "g/0", task("12+34=", "46"), response, variant=template, variant_meta=variant.meta
    )
    total = 0.0
    for part in spec.reward:
        found = registry.installed("rewards")[part.kind].load()(item, **part.options)
        total += part.weight * getattr(found, "reward", found)
    assert total == pytest.approx(accuracy + shape)
    assert not drops(spec, finished_group([1.0, 1.0]))
