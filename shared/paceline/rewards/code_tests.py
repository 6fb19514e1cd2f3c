"""Tests of programs as data sets have them, and what a program answers to one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from paceline.errors import InvalidError
from paceline.plugins import ProgramEnding, ProgramOutcome
from paceline.rewards.asserts import CALLS, MARK, take_apart
from paceline.types import Task

# Errors of `ast.parse` for a text that is no program, or one nested too deeply.
_UNPARSED = (SyntaxError, RecursionError, MemoryError)
# Source that is appended to the program; it reads the arguments, so that none can pass for code.
_CALL = """

def _paceline_call():
    import json as _json, sys as _sys
    name, arguments = _json.loads(_sys.stdin.read())
    function = globals().get(name)
    if function is None and "Solution" in globals():
        function = getattr(globals()["Solution"](), name)
    result = function(*arguments)
    _sys.stdout.write("\\n{mark}" + _json.dumps(result) + "\\n")
    _sys.stdout.flush()


_paceline_call()
""".replace("{mark}", MARK)


class TestStatus(StrEnum):
    """Outcome of a test."""

    __test__ = False

    PASSED = "passed"
    WRONG = "wrong"  # another answer
    ERROR = "error"  # an exception, an exit code, a signal, too much output
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class ProgramTest:
    """One test: what is run after the program, what it reads, and what it has to answer."""

    suffix: str
    stdin: bytes
    passes: Callable[[str], bool]  # its standard output


def tests_of(task: Task, field: str) -> list[ProgramTest]:
    """The tests in a task's payload.

    Raises:
        InvalidError: it has none, they are in none of the known forms, or an assert cannot be
            judged outside of the program.
    """
    payload: Any = json.loads(task.payload)
    tests_field: Any = payload.get(field) if isinstance(payload, dict) else None
    try:
        if isinstance(tests_field, str):  # as columns of data sets have it
            tests_field = (
                json.loads(tests_field) if tests_field.lstrip()[:1] in {"[", "{"} else [tests_field]
            )
        tests = _tests(tests_field)
    except InvalidError as error:
        raise InvalidError(
            f"payload of task {task.task_id!r}: {field!r}: {error}; write it as "
            '`assert f(1) == 2`, or as {"fn_name": ..., "inputs": [...], "outputs": [...]}'
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError, *_UNPARSED):
        tests = []
    if not tests:
        raise InvalidError(
            f"payload of task {task.task_id!r}: {field!r} has to be "
            '{"inputs": [...], "outputs": [...]}, equally many and at least one, with "fn_name" '
            'if they are arguments and results, or a list of {"input": ..., "output": ...}, or '
            "a list of assert statements"
        )
    return tests


def _tests(listed: Any) -> list[ProgramTest]:
    if isinstance(listed, dict):
        inputs, outputs = listed["inputs"], listed["outputs"]
        if not isinstance(inputs, list) or not isinstance(outputs, list):
            raise TypeError
        name = listed.get("fn_name") or ""
        return [_pair(name, *pair) for pair in zip(inputs, outputs, strict=True)]
    if not isinstance(listed, list):
        raise TypeError
    return [
        _assert(test)
        if isinstance(test, str)
        else _pair(test.get("fn_name") or "", test["input"], test["output"])
        for test in listed
    ]


def _pair(name: str, stdin: Any, expected: Any) -> ProgramTest:
    if name:
        return _call(name, stdin, expected)
    text = _text(expected)
    return ProgramTest("", _text(stdin).encode(), lambda stdout: _lines(stdout) == _lines(text))


def _text(value: Any) -> str:
    """Standard input or output; some data sets have lists of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _call(name: str, inputs: Any, expected: Any) -> ProgramTest:
    # LiveCodeBench has one JSON value a line; APPS and TACO a list of arguments.
    if isinstance(inputs, str):
        inputs = [json.loads(line) for line in inputs.splitlines()]
    if isinstance(expected, str):
        expected = _parsed(expected)
    arguments: list[Any] = inputs if isinstance(inputs, list) else [inputs]
    stdin = json.dumps([name, arguments]).encode()

    def passes(stdout: str) -> bool:
        _, mark, rest = stdout.rpartition(MARK)
        try:
            result = json.loads(rest)
        except (ValueError, RecursionError):
            return False
        # In some of them a result is in a list of one.
        return bool(mark) and (
            _equal(result, expected)
            or (isinstance(expected, list) and len(expected) == 1 and _equal(result, expected[0]))
        )

    return ProgramTest(_CALL, stdin, passes)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _equal(value: Any, expected: Any) -> bool:
    """Equal as JSON; numbers with a fraction to nine digits."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, float) or isinstance(expected, float):
        return _is_number(value) and _is_number(expected) and _is_close(value, expected)
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_equal, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        same = value.keys() == expected.keys()
        return same and all(_equal(value[key], expected[key]) for key in value)
    return bool(value == expected)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _is_close(value: float, expected: float) -> bool:
    try:
        return math.isclose(value, expected)
    except OverflowError:  # an integer that no float can hold
        return False


def _assert(statement: str) -> ProgramTest:
    asserts = take_apart(statement)
    return ProgramTest(CALLS, asserts.stdin(), asserts.hold)


def status_of(test: ProgramTest, outcome: ProgramOutcome) -> TestStatus:
    """The status of a test whose program ended this way."""
    if outcome.ending is ProgramEnding.TIMEOUT:
        return TestStatus.TIMEOUT
    if outcome.ending is ProgramEnding.EXITED and not outcome.code:
        passed = test.passes(outcome.stdout.decode(errors="replace"))
        return TestStatus.PASSED if passed else TestStatus.WRONG
    return TestStatus.ERROR


def shares(statuses: Sequence[TestStatus]) -> dict[str, float]:
    """The share of tests by what became of them."""
    return {status.value: statuses.count(status) / len(statuses) for status in TestStatus}
