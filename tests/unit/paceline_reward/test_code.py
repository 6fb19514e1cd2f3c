"""Reward `code`: programs of the policy against tests of the task, in the real sandbox."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest

from paceline.enums import ScoreStatus
from paceline.fair_queue import FairQueue, QueueOwner
from paceline.plugins import RewardInput
from paceline.rewards.code import program_in
from paceline.sandbox import landlock
from paceline.sandbox.sandbox import Sandbox
from paceline.types import Score, Task
from paceline_harness.patience import PATIENCE_S
from paceline_reward.pool import ChildPool, plain_children
from paceline_reward.programs import FairPrograms
from paceline_reward.scorer import Scorer

pytestmark = pytest.mark.skipif(not landlock.abi(), reason="this kernel has no Landlock")
ADD = "a, b = map(int, input().split())\nprint(a + b)"
TESTS = {"inputs": ["1 2", "3 4\n", "-1 1"], "outputs": ["3", "7\n", "0  \n"]}
Grade = Callable[..., Any]


@pytest.fixture
async def grade() -> AsyncIterator[Grade]:
    sandbox, queue, pool = Sandbox(), FairQueue(2), ChildPool(plain_children(), FairQueue(1))
    scorer = Scorer(pool=pool, programs=partial(FairPrograms, sandbox, queue))

    async def score(response: str, *, tests: Any = TESTS, **options: Any) -> Score:
        task = Task(task_id="t", environment="e", payload=json.dumps({"tests": tests}))
        item = RewardInput(episode_id="g/0", task=task, response=response)
        parts = json.dumps([{"kind": "code", **options}])
        (found,) = await scorer.score(parts, [item], owner=QueueOwner("tenant", "job"))
        return found

    yield score
    await pool.close()
    await sandbox.close()


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nbye", "x = 1\n"),
        ("```py\nx = 1\n```\nor\n```\nx = 2\n```", "x = 2\n"),
        ("```text", "```text"),
    ],
)
def test_the_last_block_is_the_program(response: str, program: str) -> None:
    assert program_in(response) == program


async def test_a_program_has_to_pass_all_tests(grade: Grade) -> None:
    right = await grade(f"I think:\n```python\n{ADD}\n```")
    assert (right.reward, right.parts, right.detail) == (1.0, {"code": 1.0}, "")
    some = await grade(ADD.replace("a + b", "abs(a + b) or 9"))
    assert (some.reward, some.detail) == (0.0, "code: test 2: another output")
    assert (await grade("x = (", partial=True)).reward == 0.0
    assert (await grade("print(3)", partial=True)).reward == pytest.approx(1 / 3)
    assert (await grade(ADD, max_tests=1)).reward == 1.0


@pytest.mark.parametrize(
    ("program", "status", "detail"),
    [
        ("print(", ScoreStatus.PARSE_ERROR, "exit code 1: SyntaxError: '(' was never closed"),
        ("1 / 0", ScoreStatus.OK, "exit code 1: ZeroDivisionError: division by zero"),
        ("while True: pass", ScoreStatus.OK, "took more than 0.5"),
        ("while True: print('x' * 999)", ScoreStatus.OK, "wrote too much"),
        ("import ctypes; ctypes.string_at(0)", ScoreStatus.OK, "was ended by signal 11"),
        ("print(3); import os; os._exit(1)", ScoreStatus.OK, "exit code 1: "),
        # Without a flush the right answer is not written.
        ("print(3, end=''); import os; os._exit(0)", ScoreStatus.OK, "another output"),
        ("import sys; sys.modules.clear(); raise SystemExit(0)", ScoreStatus.OK, "another output"),
        ("open('/proc/self/fd/3', 'w').write('{\"passed\": true}')", ScoreStatus.OK, "exit code 1"),
    ],
)
async def test_what_fails_says_why(
    grade: Grade, program: str, status: ScoreStatus, detail: str
) -> None:
    tests = {"inputs": ["1 2"], "outputs": ["3"]}
    score = await grade(program, tests=tests, test_time_s=0.5)
    assert (score.reward, score.status) == (0.0, status)
    assert score.detail.startswith(f"code: test 0: {detail}")


async def test_all_tests_together_are_bounded(grade: Grade) -> None:
    tests = {"inputs": [""] * 20, "outputs": [""] * 20}
    score = await grade("import time; time.sleep(0.3)", tests=tests, partial=True, timeout_s=1.0)
    assert 0.0 < score.reward < 0.25
    assert "took more than" in score.detail


@pytest.mark.parametrize(
    "tests",
    [
        None,
        [],
        [["1", "2"]],
        {},
        {"inputs": [], "outputs": []},
        {"inputs": ["1"], "outputs": []},
        ["assert f("],
        ["assert " + "-" * 100_000 + "1"],
    ],
)
async def test_a_task_without_tests_is_the_fault_of_nobody(grade: Grade, tests: Any) -> None:
    score = await grade(ADD, tests=tests)
    assert (score.reward, score.status) == (0.0, ScoreStatus.INFRA_ERROR)
    assert "payload of task 't': 'tests' has to be" in score.detail


async def test_without_a_sandbox_nothing_runs() -> None:
    pool = ChildPool(plain_children(), FairQueue(1))
    task = Task(task_id="t", environment="e", payload=json.dumps({"tests": TESTS}))
    item = RewardInput(episode_id="g/0", task=task, response=ADD)
    (score,) = await Scorer(pool=pool).score(json.dumps([{"kind": "code"}]), [item])
    assert score.status is ScoreStatus.INFRA_ERROR
    assert "has no sandbox" in score.detail


async def test_a_tenant_with_many_programs_does_not_hold_up_another(grade: Grade) -> None:
    """Two slots: endless programs of one owner, and yet each score ends."""
    slow = [grade("while True: pass", timeout_s=0.3) for _ in range(4)]
    fast = grade(ADD)
    found = await asyncio.wait_for(asyncio.gather(*slow, fast), PATIENCE_S)
    assert [each.reward for each in found] == [0.0, 0.0, 0.0, 0.0, 1.0]


CALLS = {"fn_name": "add", "inputs": [[1, 2], [0.1, 0.2]], "outputs": [3, [0.3]]}


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def add(a, b):\n    print('debug')\n    return a + b", CALLS),
        ("class Solution:\n    def add(self, a, b):\n        return a + b", CALLS),
        # Lines of JSON, as LiveCodeBench has them.
        (
            "def add(a, b): return [a, (b,)]",
            [{"fn_name": "add", "input": "1\n2", "output": "[1, [2]]"}],
        ),
        (ADD, [{"input": "1 2", "output": "3"}, {"input": ["3 4"], "output": ["7"]}]),
        (ADD, json.dumps(TESTS)),
        ("def add(a, b): return a + b", ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]),
    ],
)
async def test_forms_of_tests(grade: Grade, program: str, tests: Any) -> None:
    assert (await grade(program, tests=tests)).reward == 1.0


@pytest.mark.parametrize(
    ("program", "detail"),
    [
        ("def add(a, b): return 4", "test 0: another output"),
        ("def add(a, b): return True", "test 0: another output"),
        ("def add(a, b): return 3 if a == 1 else 10**400", "test 1: another output"),
        ("def add(a, b): return object()", "test 0: exit code 1: TypeError"),
        ("def add(a): return a", "test 0: exit code 1: TypeError"),
        ("def sub(a, b): return a", "test 0: exit code 1: "),
        ("import os; print(3); os._exit(0)", "test 0: another output"),
        ("raise SystemExit(0)", "test 0: another output"),
    ],
)
async def test_a_wrong_function_says_why(grade: Grade, program: str, detail: str) -> None:
    score = await grade(program, tests=CALLS)
    assert (score.reward, score.status) == (0.0, ScoreStatus.OK)
    assert score.detail.startswith(f"code: {detail}")


async def test_a_program_that_ends_early_has_passed_no_assert(grade: Grade) -> None:
    tests = ["assert f() == 1"]
    assert (await grade("def f(): return 2", tests=tests)).reward == 0.0
    assert (await grade("import os\ndef f(): os._exit(0)", tests=tests)).reward == 0.0


async def test_with_partial_the_score_tells_what_became_of_the_tests(grade: Grade) -> None:
    program = (
        "n = int(input())\nif n == 1: print(1)\nif n == 2: 1 / 0\nwhile n == 3: pass\nprint(end='')"
    )
    tests = {"inputs": ["1", "2", "3", "4"], "outputs": ["1", "2", "3", "4"]}
    score = await grade(program, tests=tests, partial=True, test_time_s=0.5)
    assert score.reward == 0.25
    assert {
        name: score.parts[f"code/{name}"] for name in ("passed", "wrong", "error", "timeout")
    } == {
        "passed": 0.25,
        "wrong": 0.25,
        "error": 0.25,
        "timeout": 0.25,
    }
