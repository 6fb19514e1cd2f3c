"""Reward `code`: programs of the policy against tests of the task, in the real sandbox."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest

from paceline.enums import ScoreStatus
from paceline.isolation.sandbox import landlock
from paceline.isolation.sandbox.sandbox import Sandbox
from paceline.platform.fair_queue import FairQueue, QueueOwner
from paceline.plugins import RewardInput
from paceline.rewards.code import program_in
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
    limit_s = 0.5 if "took more" in detail else 60.0
    score = await grade(program, tests=tests, test_time_s=limit_s, timeout_s=PATIENCE_S)
    assert (score.reward, score.status) == (0.0, status)
    assert score.detail.startswith(f"code: test 0: {detail}")


async def test_all_tests_together_are_bounded(grade: Grade) -> None:
    tests = {"inputs": [""] * 20, "outputs": [""] * 20}
    score = await grade("import time; time.sleep(0.6)", tests=tests, partial=True, timeout_s=3.0)
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


CHEATS = {
    "prints a constant of its own": """
import os, sys
words = [each for each in sys._getframe().f_code.co_consts if isinstance(each, str)]
print([each.strip() for each in words if len(each.strip()) == 32][-1], flush=True)
os._exit(0)
""",
    "ends early": "import os\ndef f(x): os._exit(0)",
    "exits": "raise SystemExit(0)",
    "equals everything": """
class Any(int):
    def __eq__(self, other): return True
    def __hash__(self): return 0
def f(x): return Any(1)
""",
    "exchanges the functions": "import builtins, json\nlen = all = abs = lambda *a: 7\nf = len",
    "writes nonsense": "print('paceline-result:[[[]], {}]', flush=True); import os; os._exit(0)",
    "searches": """
import gc, sys
def f(x):
    def inside(value, depth=0):
        if isinstance(value, (int, str)):
            return [1] * ("1234567" in str(value)[::-1])
        if depth < 3 and isinstance(value, dict):
            value = list(value.values())
        if depth < 3 and isinstance(value, (list, tuple, set)):
            return [hit for each in value for hit in inside(each, depth + 1)]
        return []
    frame, places = sys._getframe(), list(gc.get_objects())
    while frame:
        places += [frame.f_globals, frame.f_code.co_consts]
        frame = frame.f_back
    places = [each for each in places if isinstance(each, (dict, list, tuple, set))]
    found = inside(places) or inside([sys.stdin.read()])
    return int(str(1234567)[::-1]) if found else 0
""",
}


@pytest.mark.parametrize("cheat", CHEATS)
async def test_the_judge_of_asserts_is_out_of_reach(grade: Grade, cheat: str) -> None:
    score = await grade(CHEATS[cheat], tests=["assert f(1) == 7654321"])
    assert (score.reward, score.status) == (0.0, ScoreStatus.OK), score.detail


@pytest.mark.parametrize(
    "tests",
    [
        ["assert f(1) == 7654321"],
        {"fn_name": "f", "inputs": [[1]], "outputs": [7654321]},
        {"inputs": ["1"], "outputs": ["7654321"]},
    ],
)
async def test_what_is_expected_is_nowhere_in_the_process(grade: Grade, tests: Any) -> None:
    """The search does find what is there: the arguments of a call."""
    search = CHEATS["searches"]
    score = await grade(search + "\nprint(f(1))", tests=tests)
    assert (score.reward, score.status) == (0.0, ScoreStatus.OK), score.detail
    shown = ["assert f(1) == 7654321 and f(7654321) == 7654321"]
    assert (await grade(search, tests=shown)).reward == 1.0


@pytest.mark.parametrize(
    "statements",
    [
        "assert f((1, 2)) == (1, 2)",
        "assert f(True) is True and f(None) is None",
        "assert not f(0), 'a message'",
        "assert f(3) is 3",
        "assert set(f([2, 1])) == {1, 2}",
        "assert sorted(f([2, 1]), key=lambda each: -each) == [2, 1]",
        "import math\nassert math.isclose(f(0.1) + 0.2, 0.3, rel_tol=1e-9)",
        "assert abs(f(0.5) - 0.25) <= 1 / 4",
        "x = [3, 1]\nx.sort()\nassert f(x) == [1, 3]",
        "x = [3, 1]\nf(x).sort()\nassert x == [1, 3]",
        "expected = {'a': [1, 2.5]}\nassert f({'a': [1, 2.5]}) == expected",
        "from collections import Counter\nassert f(Counter('aab')) == {'a': 2, 'b': 1}",
        "assert list(f(iter('ab'))) == ['a', 'b'] and f(b'x') == b'x'",
        "assert f(range(3)) == range(3) and 2 in f({1, 2}) and f(1j) == 1j",
        "assert [f(each) for each in range(2)] == [0] + [1] * 1",
        "assert 1 <= f(2) < 3\nassert f(1) != 2",
        "assert f(float('inf')) == float('inf') and f(2**70) == 2**70",
        "assert isinstance(f('x'), str) and type(f(1)) == int and f('é').upper() == 'É'",
    ],
)
async def test_asserts_are_judged_as_python_judges_them(grade: Grade, statements: str) -> None:
    assert (await grade("def f(x): return x", tests=[statements])).detail == ""
    wrong = await grade("def f(x): return [x, 9]", tests=[statements])
    assert (wrong.reward, wrong.status) == (0.0, ScoreStatus.OK)


@pytest.mark.parametrize(
    ("statements", "reason"),
    [
        ("assert f(1) == g(1)", "'f(1) == g(1)' compares what the program computes"),
        ("assert all(f(x) == x for x in [1])", "cannot be evaluated outside of the program"),
        ("try:\n    assert f(1)\nexcept ValueError: pass", "is not on its own"),
        ("def check(f):\n    assert f(1)\ncheck(f)", "is not on its own"),
        ("f(1)", "it has no assert statement"),
        ("assert 1 == 1", "calls nothing of the program"),
        ("assert f'{f(1)}' == '1'", "cannot be evaluated outside of the program"),
    ],
)
async def test_an_assert_that_cannot_be_taken_apart_is_refused(
    grade: Grade, statements: str, reason: str
) -> None:
    score = await grade("def f(x): return x", tests=[statements])
    assert (score.reward, score.status) == (0.0, ScoreStatus.INFRA_ERROR)
    assert "payload of task 't': 'tests': " in score.detail
    assert reason in score.detail


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
