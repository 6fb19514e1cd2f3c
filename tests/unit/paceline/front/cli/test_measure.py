"""Jobs, rows and results of `paceline eval` and `paceline generate`, without a platform."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from paceline.enums import JobState, Purpose, TokenSource
from paceline.errors import InvalidError, StateError
from paceline.front.api.documents import JobView
from paceline.front.cli.entry import main, parser
from paceline.front.cli.measure.job import of_job, of_model, target_of
from paceline.front.cli.measure.results import document, interval
from paceline.front.cli.measure.rows import RowFile, rows_of
from paceline.types import (
    JobStatus,
    Reply,
    SamplingParams,
    Score,
    TokenSpan,
    Trajectory,
    Transcript,
    VersionRun,
)

PARENT: dict[str, Any] = {
    "name": "sums",
    "model": {"path": "/models/small"},
    "tasks": {"environment": "arithmetic", "seed": 5},
    "reward": [{"kind": "exact"}],
    "eval": {"every": 5, "tasks": 40, "options": {"split": "heldout"}},
    "evals": {"hard": {"tasks": 10, "samples": 8, "temperature": 0.5, "options": {"digits": 4}}},
    "sampling": {"temperature": 0.7},
    "trainer": {"checkpoint": {"best": {}}},
    "stop": {"steps": 100, "eval_reward": 0.9},
    "notify": {"webhook": "https://example.com/x"},
}


def options(*words: str) -> Namespace:
    arguments = parser().parse_args(words)
    arguments.collects = words[0] == "generate"
    return arguments


@pytest.mark.parametrize(
    ("text", "job", "step"),
    [
        ("sums-1a2b3c", "sums-1a2b3c", "latest"),
        ("sums-1a2b3c@120", "sums-1a2b3c", "120"),
        ("sums-1a2b3c@best", "sums-1a2b3c", "best"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "", "latest"),
        ("sums-1a2b3c@worst", "", "latest"),
        ("s3://bucket/model", "", "latest"),
    ],
)
def test_a_job_is_told_from_a_model(text: str, job: str, step: str) -> None:
    found = target_of(text)
    assert (found.job, found.step) == (job, step)
    assert found.model == ("" if job else text)


def test_a_folder_is_a_model_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums-1a2b3c").mkdir()
    assert target_of("sums-1a2b3c").model == "sums-1a2b3c"


def test_a_finished_job_is_measured_on_its_own_sets() -> None:
    arguments = options("eval", "sums-1a2b3c@best", "--samples", "4", "--pass-reward", "0.5")
    spec = of_job(arguments, target_of("sums-1a2b3c@best"), PARENT)
    assert (spec.kind, spec.name) == ("eval", "sums-eval")
    assert spec.fork is not None
    assert (spec.fork.job, spec.fork.step) == ("sums-1a2b3c", "best")
    assert spec.notify is None
    one, hard = spec.eval_sets[""], spec.eval_sets["hard"]
    # Greedy samples of a task would all be the same.
    assert (one.tasks, one.samples, one.temperature, one.options) == (
        *(40, 4, 0.7),
        {"split": "heldout"},
    )
    assert (one.pass_at, one.majority_at, one.pass_reward) == ((1, 4), (4,), 0.5)
    assert (hard.samples, hard.temperature) == (4, 0.5)


def test_a_second_set_takes_the_place_of_the_jobs_own() -> None:
    arguments = options("eval", "sums-1a2b3c@0", "--option", "digits=3", "--tasks", "7")
    spec = of_job(arguments, target_of("sums-1a2b3c@0"), PARENT)
    assert spec.fork is None  # what it began with
    assert [*spec.eval_sets] == [""]
    assert (spec.eval_sets[""].options, spec.eval_sets[""].tasks) == ({"digits": 3}, 7)
    assert spec.eval_sets[""].temperature == 0.0


def test_generated_are_the_tasks_and_the_sampling_of_training() -> None:
    arguments = options("generate", "sums-1a2b3c", "--out", "x.jsonl", "--samples", "2")
    spec = of_job(arguments, target_of("sums-1a2b3c"), PARENT)
    (found,) = spec.eval_sets.values()
    assert (found.temperature, found.seed, found.options, found.samples) == (0.7, 5, {}, 2)


def test_a_model_needs_an_environment_or_a_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="--env: is missing"):
        of_model(options("eval", "org/model"), "org/model")
    words = ("eval", "org/model", "--env", "chain", "--set", "sampling.max_tokens=9")
    spec = of_model(options(*words), "org/model")
    assert (spec.name, spec.model.path, spec.sampling.max_tokens) == ("eval-model", "org/model", 9)
    assert [part.kind for part in spec.reward] == ["environment"]
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(PARENT))
    spec = of_model(options("eval", "org/model", "-f", str(file)), "org/model")
    assert (spec.model.path, [*spec.eval_sets], spec.trains) == ("org/model", ["", "hard"], False)


def episode(task: int, index: int, *, run: str = "e0-hard") -> Trajectory:
    """Prompt 1 2, sampled 3 4, a reply 5, sampled 6; and a second transcript."""
    spans = (
        TokenSpan(0, 2, TokenSource.TEMPLATE),
        TokenSpan(2, 4, TokenSource.POLICY),
        TokenSpan(4, 5, TokenSource.ENVIRONMENT),
        TokenSpan(5, 6, TokenSource.POLICY),
    )
    first = Transcript((1, 2, 3, 4, 5, 6), spans, (-0.1, -0.2, -0.3), (VersionRun(0, 3),))
    second = Transcript((1, 7), (TokenSpan(0, 2, TokenSource.TEMPLATE),), (), ())
    return Trajectory(
        group_id=f"j-1.{run}.{task}",
        index=index,
        attempt=1,
        task_id=f"t{task}",
        purpose=Purpose.EVAL,
        transcripts=(first, second),
        score=Score(0.5, {"exact": 0.5}, normalised_answer="4"),
        sampling=SamplingParams(max_tokens=8, temperature=0.7, seed=11),
    )


def words_of(tokens: Any) -> str:
    return " ".join(map(str, tokens))


def test_rows_say_which_tokens_were_sampled_and_come_in_the_order_of_tasks(
    tmp_path: Path,
) -> None:
    file = RowFile()
    for task, index in ((10, 0), (2, 1), (2, 0)):  # newest first, as they are listed
        for place, row in rows_of(episode(task, index), job_id="j-1", decode=words_of):
            file.add(place, row)
    with pytest.raises(StateError, match="task 2 of hard has sample 0 twice"):
        file.add(*next(rows_of(episode(2, 0), job_id="j-1", decode=words_of)))
    assert file.num_episodes == 3
    lines, table = tmp_path / "x.jsonl", tmp_path / "x.parquet"
    assert file.write(lines) == file.write(table) == 6
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(r["task"], r["sample"], r["transcript"]) for r in rows][:3] == [
        *((2, 0, 0), (2, 0, 1), (2, 1, 0))
    ]
    first, second = rows[:2]
    assert (first["prompt"], first["completion"]) == ("1 2", "3 4 5 6")
    assert first["completion_mask"] == [1, 1, 0, 1]
    assert first["logprobs"] == [-0.1, -0.2, None, -0.3]
    assert first["versions"] == [0, 0, None, 0]
    assert (first["set"], first["seed"], first["version"]) == ("hard", 11, 0)
    assert (second["completion_ids"], second["version"]) == ([], -1)
    kept = pyarrow.parquet.read_table(table).to_pylist()
    assert [{**row, "parts": dict(row["parts"])} for row in kept] == rows
    assert {path.name for path in tmp_path.iterdir()} == {"x.jsonl", "x.parquet"}


def test_results_have_intervals_by_task() -> None:
    row = {
        "set": "hard",
        "reward": 0.5,
        "stderr": {"reward": 0.1, "pass@4": 0.2},
        "pass@4": 0.9,
        "measured": 25,
        "of": 30,
        "version": 0,
        "weights": "d",
        "complete": True,
    }
    low, high = interval(row, "reward") or (0.0, 0.0)
    assert (low, high) == (pytest.approx(0.304), pytest.approx(0.696))
    assert interval(row, "pass@4") == (pytest.approx(0.508), 1.0)  # a share ends at 1
    assert interval({"reward": 0.5, "stderr": {}}, "reward") is None
    status = JobStatus("j-1", "j", "default", JobState.SUCCEEDED)
    spec = {"model": {"path": "m"}, "fork": None, "evals": {"hard": {"tasks": 30, "every": 20}}}
    found = document(JobView(status=status, spec=spec, artifacts={}), [row])
    assert found["results"]["hard"]["reward_stderr"] == 0.1
    assert found["configs"] == {"hard": {"tasks": 30}}
    assert found["n-samples"] == {"hard": {"original": 30, "effective": 25}}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--out", "x.csv"), "--out: x.csv ends in '.csv'; allowed: .jsonl, .parquet"),
        (("--out", "nowhere/x.jsonl"), "--out: nowhere is no folder"),
    ],
)
def test_a_file_that_cannot_be_written_is_told_before_anything_starts(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "org/model", "--env", "chain", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("https://api.example.com/v1", "api.example.com"),
        ("http://[::1]:8000/v1", "endpoint"),
        ("mine", "mine"),
    ],
)
def test_a_model_at_an_endpoint_is_named_by_its_server(given: str, name: str) -> None:
    words = ("eval", "org/model", "--endpoint", given, "--env", "chain")
    spec = of_model(options(*words), "org/model")
    assert spec.model.endpoint is not None
    assert (spec.model.path, spec.model.endpoint.name) == ("org/model", name)


def test_a_job_file_for_training_is_measured_at_an_endpoint(tmp_path: Path) -> None:
    """What it says of workers does not count, and fields of the endpoint can be set."""
    file = tmp_path / "job.yaml"
    scaling = {"scaling": {"min_replicas": 1, "max_replicas": 2}}
    file.write_text(json.dumps({**PARENT, "rollout": scaling}))
    words = ("--endpoint", "mine", "-f", str(file), "--set", "model.endpoint.concurrency=3")
    spec = of_model(options("eval", "org/model", *words), "org/model")
    assert spec.model.endpoint is not None
    assert (spec.model.endpoint.concurrency, spec.rollout.scaling) == (3, None)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--endpoint", "http://u:p@host/v1"), "--endpoint: base_url: .*has to be http"),
        (("--endpoint", "http://host/v1", "--key-env", "NOT_SET_1"), "NOT_SET_1 is not set"),
        (("--endpoint", "a b"), "'a b' is neither a URL"),
        (("--endpoint", "mine"), "model.endpoint.name: 'mine' is not one of `endpoints` in a file"),
        (("--endpoint", "mine", "--key-env", "X"), "--key-env: is of an --endpoint with a URL"),
    ],
)
def test_a_wrong_endpoint_is_told_before_anything_starts(
    words: tuple[str, ...],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "m", "--env", "chain", *words]) == 2
    assert re.search(told, capsys.readouterr().err)


def test_rows_of_an_endpoint_have_messages_and_no_tokens(tmp_path: Path) -> None:
    calls = [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "x", "content": "5"},
        {"role": "assistant", "content": "it is 5"},
    ]
    replies = (
        Reply("<tool_call>f</tool_call>", "served", "tool_calls", 4, 3),
        Reply("it is 5", "served", "stop", 9, -1),
    )
    chat = Transcript((), (), (), (), messages=json.dumps(messages), replies=replies)
    file = RowFile()
    for place, row in rows_of(
        replace(episode(0, 0), transcripts=(chat,)), job_id="j-1", decode=words_of
    ):
        file.add(place, row)
    lines, table = tmp_path / "x.jsonl", tmp_path / "x.parquet"
    assert file.write(lines) == file.write(table) == 1
    row = json.loads(lines.read_text())
    assert (row["prompt"], row["messages"]) == ("s\n\nq", messages)
    assert row["completion"] == "<tool_call>f</tool_call>\n\n5\n\nit is 5"
    assert (row["model"], row["finish_reason"]) == ("served", "stop")
    assert (row["prompt_tokens"], row["completion_tokens"]) == (13, None)
    assert row["completion_ids"] is row["logprobs"] is row["versions"] is row["version"] is None
    [kept] = pyarrow.parquet.read_table(table).to_pylist()
    assert kept["messages"][3]["tool_call_id"] == "x"
    assert json.loads(kept["messages"][2]["tool_calls"]) == calls
    assert kept["logprobs"] is None
