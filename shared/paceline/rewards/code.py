"""Reward `code`: the program in the response, against tests of the task."""

from __future__ import annotations

import re
from typing import Annotated

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
from paceline.rewards.code_tests import TestStatus, shares, status_of, tests_of
from paceline.types import Score

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
    """1 if the program passes all tests, else 0.

    The program is the last fenced block of the response, or all of it. It runs once per test, in
    the sandbox, until one fails. Tests are of three kinds: standard input and output, whose lines
    are compared without trailing blanks; arguments and result of a function, or of a method of the
    class `Solution`; and assert statements, whose calls the program evaluates and whose comparisons
    are made here. All runs together may take the part's `timeout_s`. A response whose program
    cannot be compiled is a `parse_error`.

    Args:
        item: the payload of its task has the tests.
        programs: runs them.
        tests_field: of the payload: `{"inputs": [...], "outputs": [...]}`, texts, as in APPS, with
            `fn_name` if they are arguments and results; a list of `{"input": ..., "output": ...}`;
            or a list of assert statements, as in MBPP.
        partial: the share of tests passed instead of all or nothing; then all tests run, and the
            score has parts `passed`, `wrong`, `error` and `timeout`, shares of the tests.
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
    tests = tests_of(item.task, tests_field)[:max_tests]
    most_s = test_time_s or _MOST_S
    limits = ProgramLimits(
        time_s=most_s,
        cpu_s=int(most_s) + 1,
        memory_bytes=memory_mib << 20,
        scratch_bytes=scratch_mib << 20,
        processes=processes,
    )
    statuses: list[TestStatus] = []
    failed: tuple[int, ProgramOutcome] | None = None
    for number, test in enumerate(tests):
        outcome = await programs.run(source + test.suffix, stdin=test.stdin, limits=limits)
        statuses.append(status_of(test, outcome))
        if statuses[-1] is TestStatus.PASSED:
            continue
        failed = failed or (number, outcome)
        if not partial or _is_syntax_error(outcome):
            break
    uncompiled = failed is not None and _is_syntax_error(failed[1])
    passed = statuses.count(TestStatus.PASSED)
    return Score(
        reward=passed / len(tests) if partial else float(failed is None),
        parts=shares(statuses) if partial else {},
        status=ScoreStatus.PARSE_ERROR if uncompiled else ScoreStatus.OK,
        raw_answer=source,
        detail="" if failed is None else _why(*failed),
    )


def program_in(response: str) -> str:
    """The last fenced block of Python, or the whole response."""
    programs = _FENCED.findall(response)
    return programs[-1] if programs else response


def _is_syntax_error(outcome: ProgramOutcome) -> bool:
    last = outcome.stderr.rstrip().rpartition(b"\n")[2]
    return last.startswith((b"SyntaxError", b"IndentationError", b"TabError"))


def _why(number: int, outcome: ProgramOutcome) -> str:
    """Why the first failed test failed, without its expected answer."""
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
