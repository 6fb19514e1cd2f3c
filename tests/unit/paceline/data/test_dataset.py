"""Tasks of `dataset`: splits that stay, mixtures by weight, the same after a resume."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.environments.dataset.options import DatasetOptions
from paceline.environments.dataset.tasks import DatasetTasks
from paceline.environments.dataset.world import Dataset
from paceline.errors import InvalidError
from paceline.generation.samplers.shuffle import Shuffle
from paceline.plugins import registry
from paceline_harness.data import InProcess


def write(folder: Path, name: str, numbers: list[int]) -> None:
    lines = (json.dumps({"question": f"{name} {n}", "answer": str(n)}) + "\n" for n in numbers)
    (folder / f"{name}.jsonl").write_text("".join(lines))


def tasks_of(folder: Path, *, seed: int = 0, **options: Any) -> DatasetTasks:
    data = InProcess(uploaded=str(folder), cache=str(folder / ".cache"))
    return DatasetTasks(seed, data=data, **options)


def questions(source: DatasetTasks) -> list[str]:
    return [json.loads(source[at].payload)["question"] for at in range(len(source))]


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(0, 10_000), min_size=30, max_size=80, unique=True),
    st.lists(st.integers(10_001, 20_000), max_size=20, unique=True),
    st.floats(0.2, 0.8),
    st.randoms(use_true_random=False),
)
def test_a_row_keeps_its_split_wherever_it_is_and_whatever_is_added(
    numbers: list[int], added: list[int], share: float, random: Any
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, "a", numbers)
        parts = {"train": set[str](), "heldout": set[str]()}
        try:
            for split in parts:
                found = tasks_of(folder, split=split, heldout_share=share)
                parts[split] = set(questions(found))
        except InvalidError:  # all rows are in the other split
            assume(False)
        assert parts["train"] | parts["heldout"] == {f"a {n}" for n in numbers}
        assert not parts["train"] & parts["heldout"]
        moved = [*numbers, *added]
        random.shuffle(moved)
        write(folder, "a", moved)
        for split, before in parts.items():
            now = set(questions(tasks_of(folder, split=split, heldout_share=share, seed=7)))
            assert {each for each in now if int(each[2:]) <= 10_000} == before


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.1, 5.0)), min_size=1, max_size=4),
    st.one_of(st.none(), st.integers(1, 200)),
    st.integers(0, 5),
    st.integers(0, 300),
)
def test_a_mixture_has_its_shares_and_a_resume_goes_on_where_it_was(
    sources: list[tuple[int, float]], size: int | None, seed: int, drawn: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for at, (count, _) in enumerate(sources):
            write(folder, f"s{at}", [*range(count)])
        listed = [
            {"path": f"s{at}.jsonl", "weight": weight} for at, (_, weight) in enumerate(sources)
        ]
        options: dict[str, Any] = {"sources": listed, "size": size, "split": "all"}
        found = tasks_of(folder, seed=seed, **options)
        asked = questions(found)
        counts, total = Counter(each.split()[0] for each in asked), sum(w for _, w in sources)
        for at, (count, weight) in enumerate(sources):
            assert abs(counts[f"s{at}"] - len(asked) * weight / total) <= 1.0
            distinct = len({each for each in asked if each.startswith(f"s{at} ")})
            assert distinct == (count if size is None else min(count, counts[f"s{at}"]))
        sampler = Shuffle(len(found), seed=seed)
        before = [sampler.next() for _ in range(drawn)]
        state = json.loads(json.dumps(sampler.state()))
        after = [sampler.next() for _ in range(50)]
        # Another process, which reads everything again.
        again = Shuffle(len(tasks_of(folder, seed=seed, **options)), seed=seed)
        again.load(state)
        assert [again.next() for _ in range(50)] == after
        assert questions(tasks_of(folder, seed=seed, **options)) == asked
        assert len(before) == drawn


def test_messages_name_the_field_that_asks_for_rows(tmp_path: Path) -> None:
    data = InProcess(
        uploaded=str(tmp_path), cache=str(tmp_path / ".cache"), options_field="evals.hard.options"
    )
    with pytest.raises(InvalidError, match=r"^evals\.hard\.options\.sources\.0: none\.jsonl: no"):
        DatasetTasks(0, data=data, sources=[{"path": "none.jsonl"}])


def test_without_weights_every_row_is_there_once_and_as_listed_if_asked(tmp_path: Path) -> None:
    write(tmp_path, "a", [1, 2, 3])
    write(tmp_path, "b", [4])
    both: dict[str, Any] = {"sources": [{"path": "a.jsonl"}, {"path": "b.jsonl"}], "split": "all"}
    assert sorted(questions(tasks_of(tmp_path, **both))) == ["a 1", "a 2", "a 3", "b 4"]
    listed = tasks_of(tmp_path, order="listed", **both)
    assert questions(listed) == ["a 1", "a 2", "a 3", "b 4"]


async def test_tasks_of_environments_are_played_in_their_own_worlds(tmp_path: Path) -> None:
    write(tmp_path, "a", [*range(20)])
    options: dict[str, Any] = {
        "sources": [
            {"path": "a.jsonl", "weight": 1, "name": "mine"},
            {"environment": "guess_number", "options": {"max_turns": 2}, "weight": 1},
        ],
        "system_prompt": "Be brief.",
    }
    source, turns = tasks_of(tmp_path, **options), Counter[str]()
    for at in range(20):
        task, world = source[at], Dataset(**options)
        first = await world.reset(task, 0)
        result = await world.step(json.loads(task.payload).get("answer", "no number"))
        turns[task.domain.split("/")[0]] += 1
        if task.domain == "dataset/mine":
            assert first.messages[0].content == "Be brief."
            assert result.done
            assert result.reward == 1.0
        else:
            assert not result.done
        await world.close()
    assert {*turns} == {"dataset", "guess_number"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sources": [{"path": "a", "environment": "arithmetic"}]}, "one of them is allowed"),
        ({"sources": [{"path": "a", "weight": 1}, {"path": "b"}]}, "all of them have a weight"),
        ({"sources": [{"environment": "dataset"}]}, "a source of itself"),
        ({"sources": []}, "at least 1 item"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DatasetOptions.model_validate(options)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gymnasium", "environment: worlds of 'gymnasium' live in processes of their own"),
        ("none", "environment: 'none' is not"),
    ],
)
def test_environments_that_cannot_be_mixed_in_are_refused_at_once(
    tmp_path: Path, name: str, says: str
) -> None:
    write(tmp_path, "a", [1])
    sources = [{"path": "a.jsonl"}, {"environment": name, "options": {"id": "CartPole-v1"}}]
    with pytest.raises(InvalidError, match=rf"^tasks\.options\.sources\.1\.{says}"):
        tasks_of(tmp_path, sources=sources, split="all")


def test_it_is_a_plug_in_like_any_other() -> None:
    assert registry.environment("dataset").load_tasks() is DatasetTasks
