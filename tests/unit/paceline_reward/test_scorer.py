from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from paceline.enums import ScoreStatus
from paceline.errors import ConfigError, InvalidError
from paceline.plugins import RewardInput, RewardTurn
from paceline.plugins.allowed import AllowedTargets
from paceline_reward.pool import ChildPool
from paceline_reward.scorer import Scorer

MakeItem = Callable[..., RewardInput]
INFRA = ScoreStatus.INFRA_ERROR


def section(*parts: dict[str, Any]) -> str:
    return json.dumps(parts)


async def test_weighted_sum_of_named_parts(scorer: Scorer, item: MakeItem) -> None:
    parts = section({"kind": "exact", "weight": 2.0}, {"kind": "environment", "name": "env"})
    items = [item("42", environment_reward=0.5), item("41", environment_reward=0.25)]
    right, wrong = await scorer.score(parts, items)
    assert (right.reward, right.parts) == (2.5, {"exact": 1.0, "env": 0.5})
    assert (wrong.reward, wrong.parts) == (0.25, {"exact": 0.0, "env": 0.25})
    assert right.status is ScoreStatus.OK
    assert right.raw_answer == "42"


async def test_a_part_sees_those_it_is_after_also_in_another_process(
    scorer: Scorer, item: MakeItem
) -> None:
    parts = section(
        {"kind": "exact"},
        {"kind": "user_rewards:told", "name": "told", "after": ["exact"], "weight": 0.0},
        {"kind": "user_rewards:told", "name": "untold", "weight": 0.0},
        {"kind": "user_rewards:told", "name": "last", "after": ["told"]},
    )
    turns = (RewardTurn("a", 0.5, 3), RewardTurn("42", 0.0, 9))
    given = replace(item("42"), turns=turns, max_tokens=10)
    (score,) = await scorer.score(parts, [given])
    seen = 10 * (3 + 9) + 0.5
    assert score.parts == {"exact": 1.0, "told": seen + 1, "untold": seen, "last": 2 * seen + 1}


async def test_items_fail_one_by_one(scorer: Scorer, item: MakeItem) -> None:
    no_field = RewardInput(episode_id="x", task=item("42").task, response="42")
    parts = section({"kind": "exact", "answer_field": "result"}, {"kind": "environment"})
    (score,) = await scorer.score(parts, [no_field])
    assert (score.reward, score.status) == (0.0, INFRA)
    assert "exact: InvalidError: payload" in score.detail
    assert score.parts["environment"] == 0.0


async def test_not_a_number_from_the_environment(scorer: Scorer, item: MakeItem) -> None:
    items = [item("", environment_reward=float("nan")), item("", environment_reward=1.0)]
    bad, good = await scorer.score(section({"kind": "environment"}), items)
    assert (bad.status, good.reward) == (INFRA, 1.0)


async def test_no_items(scorer: Scorer) -> None:
    assert await scorer.score(section({"kind": "exact"}), []) == []
    assert scorer.load()["busy_s"] == 0.0
    await scorer.idle()


async def test_worst_status_wins(scorer: Scorer, item: MakeItem) -> None:
    parts = section({"kind": "environment"}, {"kind": "exact", "numeric": True})
    (score,) = await scorer.score(parts, [item("x", environment_reward=0.5)])
    assert (score.status, score.reward) == (ScoreStatus.PARSE_ERROR, 0.5)
    assert score.detail == "exact: the response is not a number"


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ('[{"kind": "exakt"}]', "'exakt' is not installed; installed: code, environment, "),
        (
            '[{"kind": "exact", "fuzzy": 1}]',
            "0.fuzzy: unknown option of 'exact'; allowed: answer_field",
        ),
        ('[{"kind": "regex"}]', "reward.0.pattern: is missing"),
        ('[{"kind": "python"}]', "reward.0.function: is missing"),
        (
            '[{"kind": "python", "function": "x"}]',
            "function: String should match .*got 'x'",
        ),
        ('[{"kind": "exact", "weight": "much"}]', "reward: 0.weight: .* \\(got 'much'\\)"),
        ("[]", "at least 1 item"),
        ("{", "not JSON"),
    ],
)
async def test_bad_sections(scorer: Scorer, rewards: str, message: str) -> None:
    with pytest.raises(InvalidError, match=message):
        await scorer.score(rewards, [])


def test_a_config_error_is_invalid() -> None:
    assert issubclass(ConfigError, InvalidError)


async def test_load_counts(pool: ChildPool, item: MakeItem, listed: AllowedTargets) -> None:
    now = 100.0

    def clock() -> float:
        return now

    scorer = Scorer(pool=pool, clock=clock, allowed=listed)
    running = asyncio.create_task(
        scorer.score(section({"kind": "user_rewards:pid"}), [item("")] * 3)
    )
    await asyncio.sleep(0)
    now = 107.0
    assert scorer.load() == {"pending": 3.0, "scored": 0.0, "busy_s": 7.0}
    await running
    assert scorer.load() == {"pending": 0.0, "scored": 3.0, "busy_s": 7.0}


async def test_sections_are_read_once_and_forgotten(pool: ChildPool, item: MakeItem) -> None:
    scorer = Scorer(pool=pool, max_cached=2)
    for weight in (1.0, 2.0, 3.0, 1.0):
        (score,) = await scorer.score(section({"kind": "exact", "weight": weight}), [item("42")])
        assert score.reward == weight


async def test_the_answer_is_that_of_the_first_part_that_normalises_one(
    scorer: Scorer, item: MakeItem
) -> None:
    parts = section({"kind": "format"}, {"kind": "math"}, {"kind": "exact"})
    (found,) = await scorer.score(parts, [item("<think>a</think><answer>84/2</answer>")])
    assert (found.normalised_answer, found.parts["format"]) == ("42", 1.0)
