from __future__ import annotations

import json

import pytest

from paceline.environments.arithmetic.tasks import ArithmeticTasks
from paceline.environments.arithmetic.world import Arithmetic
from paceline.environments.reasoning_gym.tasks import ReasoningGymTasks, pack, unpack
from paceline.environments.reasoning_gym.world import ReasoningGym, extract_answer
from paceline.errors import InvalidError
from paceline.plugins import Message


@pytest.mark.parametrize(
    ("reply", "reward"), [("{}", 1.0), (" {} \n", 1.0), ("{}0", 0.0), ("", 0.0)]
)
async def test_arithmetic_compares_stripped_text(reply: str, reward: float) -> None:
    task = ArithmeticTasks(0)[3]
    world = Arithmetic(digits=2, split="train")
    observation = await world.reset(task, 0)
    assert observation.text == json.loads(task.payload)["question"]
    result = await world.step(reply.format(json.loads(task.payload)["answer"]))
    assert (result.reward, result.done) == (reward, True)


@pytest.mark.parametrize("dataset", ["chain_sum", "spell_backward", "arc_agi", "leg_counting"])
async def test_a_data_set_scores_its_own_answers_as_right(dataset: str) -> None:
    task = ReasoningGymTasks(0, dataset=dataset, size=20)[1]
    world = ReasoningGym(dataset=dataset, size=20, split="train")
    await world.reset(task, 0)
    answer = json.loads(task.payload)["answer"]
    result = await world.step(f"I think it is <answer>{answer}</answer>")
    assert (result.reward, result.done) == (1.0, True)
    await world.reset(task, 0)
    assert (await world.step("no idea")).reward < 1.0


async def test_a_system_prompt_comes_first() -> None:
    task = ReasoningGymTasks(0, system_prompt="Be brief.")[0]
    observation = await ReasoningGym(system_prompt="Be brief.").reset(task, 0)
    assert observation.messages[0] == Message("system", "Be brief.")
    assert observation.text.startswith("Be brief.\n\n")


@pytest.mark.parametrize(
    ("reply", "extract", "answer"),
    [
        ("<answer>1</answer> or <answer> 2\n</answer>", "tag", "2"),
        (" 3 ", "tag", "3"),
        (" 3 ", "tag_only", None),
        ("<answer>1</answer>", "whole", "<answer>1</answer>"),
    ],
)
def test_what_counts_as_the_answer(reply: str, extract: str, answer: str | None) -> None:
    assert extract_answer(reply, extract) == answer


def test_a_wrong_extract_is_named() -> None:
    with pytest.raises(InvalidError, match="extract: 'regex'"):
        ReasoningGym(extract="regex")  # pyright: ignore[reportArgumentType]


def test_tuples_survive_json() -> None:
    metadata = {"grid": ((1, 2), (3,)), "list": [1, {"a": (2,)}]}
    assert unpack(json.loads(json.dumps(pack(metadata)))) == metadata
