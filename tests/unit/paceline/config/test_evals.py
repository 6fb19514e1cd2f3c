"""Evaluations of a job file: one, or several by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.config import JobSpec, parse_job
from paceline.config.named import named
from paceline.config.sections.model import ModelPlace
from paceline.errors import InvalidError

JOB: dict[str, Any] = {
    "name": "j",
    "model": {"path": "m"},
    "tasks": {"environment": "arithmetic", "options": {"digits": 2}},
    "reward": [{"kind": "exact"}],
}


def parsed(**changes: Any) -> JobSpec:
    return parse_job({**JOB, **changes})


def test_named_evaluations_replace_the_default_and_stand_beside_one_of_the_job() -> None:
    assert [*parsed().eval_sets] == [""]
    named = {"b": {"every": 7}, "a": {"tasks": 3}}
    alone = parsed(evals=named)
    assert (alone.eval, [*alone.eval_sets], alone.main_eval) == (None, ["a", "b"], "a")
    beside = parsed(eval={"every": 5}, evals=named)
    assert ([*beside.eval_sets], beside.main_eval) == (["", "a", "b"], "")
    assert [each.every for each in beside.eval_sets.values()] == [5, 20, 7]
    assert parsed(eval=None).main_eval is None
    for spec in (alone, beside):
        assert parse_job(json.loads(spec.model_dump_json())) == spec


def test_the_options_of_each_are_checked_under_its_field() -> None:
    spec = parsed(evals={"hard": {"options": {"digits": 3}}})
    fields = {each.options_field: each.options for each in named(spec) if each.options}
    assert fields["evals.hard.options"] == {"digits": 3}


@pytest.mark.parametrize(
    ("evals", "told"),
    [
        ({"Hard": {}}, "evals.Hard"),
        ({"a": {"samples": 4}}, "samples: 4 with temperature 0 .*allowed: 1, or a temperature"),
        (
            {"a": {"samples": 4, "temperature": 1, "pass_at": [1, 8]}},
            r"pass_at: \[1, 8\] with samples 4; allowed: 1 to 4, each once",
        ),
        (
            {"a": {"samples": 4, "temperature": 1, "majority_at": [2, 2]}},
            r"majority_at: \[2, 2\] with samples 4",
        ),
        ({"a": {"pass_at": [0]}}, "greater than 0"),
        (
            {"a": {"tasks": 100_000, "samples": 16, "temperature": 1}},
            "evals: tasks times samples are 1600000 episodes over all evaluations; at most 1048576",
        ),
        ({f"e{n}": {} for n in range(17)}, "at most 16"),
    ],
)
def test_wrong_evaluations_are_refused(evals: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidError, match=told):
        parsed(evals=evals)


@pytest.mark.parametrize(
    ("best", "problem"),
    [
        ({"metric": "pass@4"}, ""),
        ({"eval": "hard", "metric": "maj@2", "direction": "max"}, ""),
        ({"metric": "response_tokens_mean", "direction": "min"}, ""),
        (
            {"metric": "pass@2"},
            r"trainer.checkpoint.best.metric: 'pass@2' is not measured; allowed: reward, "
            r"response_tokens_mean, truncated_share, pass@4",
        ),
        ({"eval": "easy"}, r"trainer.checkpoint.best.eval: 'easy' is not one of evals; .*: hard"),
    ],
)
def test_the_best_checkpoint_is_by_something_measured(best: Any, problem: str) -> None:
    several = {"temperature": 1.0, "samples": 4}
    fields = {
        "eval": {**several, "pass_at": [4]},
        "evals": {"hard": {**several, "majority_at": [2]}},
        "trainer": {"checkpoint": {"best": best}},
    }
    if not problem:
        assert parsed(**fields).trainer.checkpoint.best is not None
        return
    with pytest.raises(InvalidError, match=problem):
        parsed(**fields)


ENDPOINT: dict[str, Any] = {"path": "gpt-4o-mini", "endpoint": {"name": "openai"}}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kind": "train"}, "model.endpoint: 'openai' with kind train.*allowed: kind eval"),
        ({"fork": {"job": "a-1a2b3c"}}, "fork: with model.endpoint"),
        ({"model": {**ENDPOINT, "path": ""}}, "model.path: is empty"),
        ({"model": {**ENDPOINT, "revision": "main"}}, "model.revision: with model.endpoint"),
        (
            {"rollout": {"scaling": {"min_replicas": 1, "max_replicas": 2}}},
            "rollout.scaling: with model.endpoint",
        ),
        (
            {"tasks": {"environment": "tools", "options": {"tool_parser": "pythonic"}}},
            "tasks.options.tool_parser: 'pythonic' with model.endpoint.*allowed: hermes",
        ),
        (
            {"model": {"path": "m", "endpoint": {"name": "https://api.openai.com/v1"}}},
            "model.endpoint.name.*is the name of a server.*its URL belongs into",
        ),
        (
            {"model": {"path": "m", "endpoint": {"name": "a", "request": {"messages": []}}}},
            "model.endpoint.request.*'messages' is set by the job",
        ),
    ],
)
def test_an_outside_endpoint_is_only_measured(changes: dict[str, Any], told: str) -> None:
    job = {**JOB, "kind": "eval", "eval": {"tasks": 3}, "model": ENDPOINT}
    assert parse_job(job).model.place is ModelPlace.ENDPOINT
    with pytest.raises(InvalidError, match=told):
        parse_job({**job, **changes})
