"""Answers of tasks are read at submit, by the rewards that will read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.config.job import RewardSpec
from paceline.environments.dataset.tasks import DatasetTasks
from paceline.errors import InvalidError
from paceline.types import Task
from paceline_experience.ledger.generation.golds import CHECK_S, check_golds
from paceline_harness.data import InProcess


def rows(folder: Path, answers: list[Any]) -> DatasetTasks:
    lines = (json.dumps({"question": f"q{at}", "answer": a}) for at, a in enumerate(answers))
    (folder / "a.jsonl").write_text("\n".join(lines))
    data = InProcess(uploaded=str(folder), cache=str(folder / ".cache"))
    return DatasetTasks(0, data=data, split="all")


def part(kind: str, **options: Any) -> RewardSpec:
    return RewardSpec.model_validate({"kind": kind, **options})


@pytest.mark.parametrize(
    ("kind", "answer", "problem"),
    [
        ("math", None, "field 'answer' is null; it has to be LaTeX, a number, or a word"),
        ("math", "\\frac{1}{", "the task's answer '\\\\frac{1}{' is not mathematical"),
        ("math", True, "field 'answer' is true"),
        ("numeric", "\\sqrt{2}", "the task's answer '\\\\sqrt{2}' is no number"),
        ("numeric", None, "the task's answer 'null' is no number"),
        ("environment", None, "field 'answer' of task "),
        ("exact", None, "field 'answer' of task "),
        ("exact", "6*7=42\n#### 42", "the task's answer is a solution that ends with '#### 42'"),
        ("environment", "so it is 42\n#### 42", "the task's answer is a solution that ends"),
    ],
)
def test_a_row_that_its_reward_cannot_read_is_named(
    tmp_path: Path, kind: str, answer: Any, problem: str
) -> None:
    source = rows(tmp_path, [1, "2", answer, 4.5])
    with pytest.raises(InvalidError) as refused:
        check_golds(
            [part("format"), part(kind)],
            {"tasks.options": source},
            world="dataset",
            clock=lambda: 0.0,
        )
    assert refused.value.message.startswith(f"tasks.options: row 2 of data: reward.1: {problem}")


def test_readable_answers_and_other_rewards_pass(tmp_path: Path) -> None:
    source = rows(tmp_path, [1, "2", "3/4", 4.5])
    check_golds(
        [part("math"), part("numeric", percent="points")],
        {"tasks.options": source},
        world="dataset",
    )
    null = rows(tmp_path, [None])
    check_golds([part("format"), part("own:code")], {"tasks.options": null}, world="dataset")
    check_golds([part("environment"), part("exact")], {"tasks.options": source}, world="dataset")


def test_exact_reads_its_answers_as_its_options_say(tmp_path: Path) -> None:
    source = rows(tmp_path, ["42", "forty-two"])
    check_golds([part("exact")], {"tasks.options": source}, world="dataset")
    with pytest.raises(InvalidError, match=r"row 1 of data: reward\.0: .*'forty-two' is no number"):
        check_golds([part("exact", numeric=True)], {"tasks.options": source}, world="dataset")


def test_a_world_of_its_own_may_need_no_answer(tmp_path: Path) -> None:
    sources = {"tasks.options": rows(tmp_path, [None])}
    check_golds([part("environment")], sources, world="own:WORLD")
    with pytest.raises(InvalidError, match=r"reward\.0: field 'answer' of task .* is null"):
        check_golds([part("exact")], sources, world="own:WORLD")


def test_many_wrong_rows_are_counted(tmp_path: Path) -> None:
    source = rows(tmp_path, ["none"] * 8 + ["1"])
    with pytest.raises(InvalidError) as refused:
        check_golds([part("numeric")], {"tasks.options": source}, world="dataset")
    assert refused.value.message.count("is no number") == 5
    assert refused.value.message.endswith(" (and 3 more)")


def test_the_field_that_names_the_answer_is_read(tmp_path: Path) -> None:
    source = rows(tmp_path, ["1"])
    with pytest.raises(InvalidError, match=r"reward\.0: payload of task .* has no field 'result'"):
        check_golds(
            [part("math", answer_field="result")], {"tasks.options": source}, world="dataset"
        )


def test_evaluations_are_checked_too(tmp_path: Path) -> None:
    for name in ("train", "eval"):
        (tmp_path / name).mkdir()
    train, held_out = rows(tmp_path / "train", ["1"]), rows(tmp_path / "eval", ["one"])
    sources = {"tasks.options": train, "eval.options": held_out}
    with pytest.raises(InvalidError, match=r"^eval\.options: row 0 of data: reward\.0: "):
        check_golds([part("numeric")], sources, world="dataset")


def test_no_job_waits_long_for_its_rows(tmp_path: Path) -> None:
    source = rows(tmp_path, ["1"] * 50 + ["one"] * 50)
    times = iter([0.0, *(0.1 for _ in range(9)), *(CHECK_S + 1 for _ in range(99))])
    seen = list[str]()

    def clock() -> float:
        seen.append("")
        return next(times)

    with pytest.raises(InvalidError) as refused:
        check_golds([part("numeric")], {"tasks.options": source}, world="dataset", clock=clock)
    assert refused.value.message.count("is no number") <= 10
    assert len(seen) == 11


class Broken:
    """A source that cannot make one of its tasks, and makes one that is no JSON."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, position: int) -> Task:
        if position == 0:
            raise KeyError("question")
        return Task(f"t{position}", "rows", "{" if position == 1 else '{"answer": "1"}')


def test_a_source_that_breaks_refuses_no_job_for_it() -> None:
    with pytest.raises(InvalidError) as refused:
        check_golds([part("math")], {"tasks.options": Broken()}, world="dataset")
    assert refused.value.message.startswith("tasks.options: task 1: reward.0: JSONDecodeError: ")
    assert "task 0" not in refused.value.message
