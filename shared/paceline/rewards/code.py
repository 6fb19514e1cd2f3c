"""Reward `code`: the program in the response, against tests of the task."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import Field

from paceline.enums import ScoreStatus
from paceline.errors import InvalidError
from paceline.plugins import (
    ProgramEnding,
    ProgramLimits,
    ProgramOutcome,
    Programs,
    RewardInput,
    declares,
)
from paceline.types import Score, Task

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_MOST_S = 600.0
_MOST_MIB = 8192
Seconds = Annotated[float, Field(gt=0, le=_MOST_S)]
Megabytes = Annotated[int, Field(ge=128, le=4096)]
Scratch = Annotated[int, Field(ge=0, le=256)]
Processes = Annotated[int, Field(ge=0, le=64)]


@declares(programs=True)
async def code(
    item: RewardInput,
    *,
    programs: Programs,
    tests_field: str = "tests",
    partial: bool = False,
    test_time_s: Seconds | None = None,
    memory_mib: Megabytes = 512,
    scratch_mib: Scratch = 0,
    processes: Processes = 0,
    max_tests: Annotated[int, Field(ge=1)] = 64,
) -> Score:
    """1 if the program prints what all tests expect, else 0.

    The program is the last fenced block of the response, or all of it. It runs once per test, in
    the sandbox, with the test's input as standard input, until one fails; lines are compared
    without trailing blanks. All runs together may take the part's `timeout_s`. A response whose
    program cannot be compiled is a `parse_error`.

    Args:
        item: the payload of its task has the tests.
        programs: runs them.
        tests_field: of the payload: `{"inputs": [...], "outputs": [...]}`, texts, as in APPS.
        partial: the share of tests passed instead of all or nothing; then all tests run.
        test_time_s: wall-clock time of each test, if it is bounded by more than `timeout_s`.
        memory_mib: address space of each process, with about 100 MiB of the interpreter itself.
        scratch_mib: of a folder `/tmp` of its own, empty at first; it works where the sandbox has
            level 3, as do further processes.
        processes: how many further processes a program may have at a time.
        max_tests: the first tests only.
    """
    if memory_mib * (processes + 1) > _MOST_MIB:
        raise InvalidError(
            f"memory_mib: {memory_mib} for each of {processes + 1} processes; "
            f"allowed: {_MOST_MIB} together"
        )
    source = program_in(item.response)
    tests = _tests(item.task, tests_field)[:max_tests]
    most_s = test_time_s or _MOST_S
    limits = ProgramLimits(
        time_s=most_s,
        cpu_s=int(most_s) + 1,
        memory_bytes=memory_mib << 20,
        scratch_bytes=scratch_mib << 20,
        processes=processes,
    )
    passed, failed = 0, None
    for number, (given, expected) in enumerate(tests):
        outcome = await programs.run(source, stdin=given.encode(), limits=limits)
        if _passes(outcome, expected):
            passed += 1
            continue
        failed = failed or (number, outcome)
        if not partial or _is_syntax_error(outcome):
            break
    uncompiled = failed is not None and _is_syntax_error(failed[1])
    return Score(
        reward=passed / len(tests) if partial else float(failed is None),
        parts={},
        status=ScoreStatus.PARSE_ERROR if uncompiled else ScoreStatus.OK,
        raw_answer=source,
        detail="" if failed is None else _why(*failed),
    )


def program_in(response: str) -> str:
    """The last fenced block of Python, or the whole response."""
    found = _FENCED.findall(response)
    return found[-1] if found else response


def _tests(task: Task, field: str) -> list[tuple[str, str]]:
    payload: Any = json.loads(task.payload)
    found: Any = payload.get(field) if isinstance(payload, dict) else None
    inputs, outputs = ([], []) if not isinstance(found, dict) else _columns(found)
    if not inputs or len(inputs) != len(outputs):
        raise InvalidError(
            f"payload of task {task.task_id!r}: {field!r} has to be "
            '{"inputs": [text, ...], "outputs": [text, ...]}, equally many and at least one'
        )
    return list(zip(inputs, outputs, strict=True))


def _columns(found: dict[str, Any]) -> tuple[list[str], list[str]]:
    columns = (found.get("inputs"), found.get("outputs"))
    inputs, outputs = (
        [str(each) for each in column] if isinstance(column, list) else [] for column in columns
    )
    return inputs, outputs


def _passes(outcome: ProgramOutcome, expected: str) -> bool:
    if outcome.ending is not ProgramEnding.EXITED or outcome.code:
        return False
    return _lines(outcome.stdout.decode(errors="replace")) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _is_syntax_error(outcome: ProgramOutcome) -> bool:
    last = outcome.stderr.rstrip().rpartition(b"\n")[2]
    return last.startswith((b"SyntaxError", b"IndentationError", b"TabError"))


def _why(number: int, outcome: ProgramOutcome) -> str:
    """What was wrong with the first test that failed, without its expected answer."""
    match outcome.ending:
        case ProgramEnding.TIMEOUT:
            what = f"took more than {outcome.seconds:.3g} s"
        case ProgramEnding.OUTPUT:
            what = "wrote too much"
        case ProgramEnding.KILLED:
            what = f"was ended by signal {outcome.code}"
        case ProgramEnding.EXITED if outcome.code:
            last = outcome.stderr.decode(errors="replace").rstrip().rpartition("\n")[2]
            what = f"exit code {outcome.code}: {last}"
        case ProgramEnding.EXITED:
            what = "another output"
    return f"test {number}: {what}"
