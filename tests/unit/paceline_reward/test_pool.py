from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.enums import ScoreStatus
from paceline.plugins import RewardInput
from paceline.types import Score
from paceline_harness.patience import PATIENCE_S
from paceline_reward.scorer import Scorer

MakeItem = Callable[..., RewardInput]
INFRA = ScoreStatus.INFRA_ERROR
LIMIT_S = 5.0  # of those that hang; enough for those that do not, on a busy machine too


def user(name: str, **options: Any) -> str:
    return json.dumps([{"kind": f"user_rewards:{name}", "timeout_s": 60.0} | options])


def split(scores: list[Score]) -> tuple[list[float], list[str]]:
    good = [score.reward for score in scores if score.status is ScoreStatus.OK]
    return good, [score.detail for score in scores if score.status is INFRA]


@pytest.mark.parametrize(
    ("deed", "detail"),
    [
        ("crash", "the scorer process died (exit code 3)"),
        ("exit", "SystemExit: 4"),
        ("raise", "ZeroDivisionError: division by zero"),
        ("nan", "returned nan with parts {}; rewards have to be finite numbers"),
        ("text", "returned str: neither a number nor a Score"),
        ("none", "returned NoneType: neither a number nor a Score"),
        ("bad score", "returned a Score with wrong fields"),
        ("inf part", "have to be finite numbers"),
        ("huge", "returned int: int too large to convert to float"),
        ("brackets", "unreadable answer: recursion limit exceeded"),
    ],
)
async def test_a_bad_item_harms_no_other(
    scorer: Scorer, item: MakeItem, deed: str, detail: str
) -> None:
    items = [item("1"), item("2"), item(deed), item("3"), item("4"), item("5")]
    scores = await scorer.score(user("by_response"), items)
    good, bad = split(scores)
    assert good == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert len(bad) == 1
    assert detail in bad[0]
    assert scores[2].reward == 0.0


async def test_a_computation_that_no_signal_interrupts_is_a_timeout(
    scorer: Scorer, item: MakeItem
) -> None:
    items = [item("1"), item("bomb"), item("2")]
    scores = await scorer.score(user("endless"), items)
    assert [each.reward for each in scores] == [1.0, 0.0, 1.0]
    assert [each.status for each in scores] == [
        ScoreStatus.OK,
        ScoreStatus.TIMEOUT,
        ScoreStatus.OK,
    ]


async def test_a_hung_item_is_killed(scorer: Scorer, item: MakeItem) -> None:
    items = [item("1"), item("hang"), item("hang"), item("2")]
    good, bad = split(await scorer.score(user("by_response", timeout_s=LIMIT_S), items))
    assert good == [1.0, 2.0]
    assert [text.endswith("no score within 5 s") for text in bad] == [True, True]


async def test_one_that_left_with_the_pipes_holds_up_nothing(
    scorer: Scorer, item: MakeItem, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    reward = user("stray", timeout_s=LIMIT_S, pid_file=str(pid_file))
    try:
        scores = await asyncio.wait_for(scorer.score(reward, [item("")]), PATIENCE_S)
        assert [score.status for score in scores] == [INFRA]
    finally:
        os.kill(int(pid_file.read_text()), signal.SIGKILL)


async def test_a_pattern_that_backtracks_for_ever(scorer: Scorer, item: MakeItem) -> None:
    parts = json.dumps([{"kind": "regex", "pattern": "^(a+)+$", "timeout_s": LIMIT_S}])
    bad, good = await scorer.score(parts, [item("a" * 60 + "b"), item("aaa")])
    assert (bad.status, good.reward) == (INFRA, 1.0)


async def test_printing_does_not_break_the_frames(scorer: Scorer, item: MakeItem) -> None:
    good, bad = split(await scorer.score(user("by_response"), [item("print"), item("7")]))
    assert (good, bad) == ([0.5, 7.0], [])


async def test_asynchronous_functions_parts_and_options(scorer: Scorer, item: MakeItem) -> None:
    parts = json.dumps(
        [{"kind": "python", "name": "p", "function": "user_rewards:later", "bonus": 0.5}]
    )
    (score,) = await scorer.score(parts, [item("2")])
    assert (score.reward, score.parts) == (2.5, {"p": 2.5, "p/bonus": 0.5})
    assert (score.status, score.raw_answer) == (ScoreStatus.PARSE_ERROR, "2")


@pytest.mark.parametrize(
    ("kind", "detail"),
    [
        ("no_such_module:f", "cannot import 'no_such_module:f'"),
        ("user_rewards:no_such", "cannot import 'user_rewards:no_such'"),
        ("broken_import:f", "the scorer process died (exit code 5)"),
        ("noisy_import:f", "unreadable answer"),
    ],
)
async def test_functions_that_cannot_be_imported(
    scorer: Scorer, item: MakeItem, kind: str, detail: str
) -> None:
    scores = await scorer.score(json.dumps([{"kind": kind}]), [item("1")] * 3)
    assert [detail in score.detail for score in scores] == [True] * 3
    assert {score.status for score in scores} == {INFRA}


async def test_children_are_few_and_reused(scorer: Scorer, item: MakeItem) -> None:
    calls = [scorer.score(user("pid"), [item("")] * 10) for _ in range(4)]
    pids = {score.reward for scores in await asyncio.gather(*calls) for score in scores}
    assert len(pids) == 2
    assert float(os.getpid()) not in pids


async def test_a_cancelled_call_frees_its_children(scorer: Scorer, item: MakeItem) -> None:
    call = asyncio.create_task(scorer.score(user("by_response"), [item("hang")] * 4))
    await asyncio.sleep(0.2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    good, _ = split(await scorer.score(user("by_response"), [item("1")] * 4))
    assert good == [1.0] * 4
    assert scorer.load()["pending"] == 0.0
