from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline.errors import ConfigError, InvalidError
from paceline.v1 import jobs_pb2 as pb
from paceline_harness.patience import call

if TYPE_CHECKING:
    from conftest import Gateway
else:
    Gateway = Any

Change = dict[str, Any]


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (
            {"modle": 1},
            "ConfigError",
            "modle: unknown field; allowed here: code, data, eval, evals, experience",
        ),
        (
            {"trainer": {"optimizer": {"learning_rate": 1}}},
            "ConfigError",
            "trainer.optimizer.learning_rate: unknown field; allowed here: betas, eps, kind, lr",
        ),
        (
            {"stop": {"steps": "many"}},
            "ConfigError",
            "stop.steps: Input should be a valid integer",
        ),
        ({"recipe": "m2pp"}, "ConfigError", "recipe: 'm2pp' is not installed; did you mean 'm2po'"),
        ({"name": None}, "ConfigError", "name: Input should be a valid string (got null)"),
        ({"model": {}}, "ConfigError", "model.path: is missing"),
        (
            {"model": {"path": "/no/such/model"}},
            "ConfigError",
            "model.path: /no/such/model does not exist",
        ),
        (
            {"reward": ["exakt"]},
            "ConfigError",
            "reward.0.kind: 'exakt' is not installed; installed: code, environment, exact, ",
        ),
        (
            {"reward": [{"kind": "python"}]},
            "ConfigError",
            "reward.0.function: is missing",
        ),
        (
            {"reward": [{"kind": "regex", "pattern": "("}]},
            "ConfigError",
            "reward.0.pattern: not a regular expression: missing ), unterminated subpattern",
        ),
        (
            {"tasks": {"environment": "chess"}},
            "ConfigError",
            "tasks.environment: 'chess' is not installed; installed: arithmetic",
        ),
        (
            {"trainer": {"objective": {"surrogate": "sgd"}}},
            "ConfigError",
            "trainer.objective.surrogate.kind: 'sgd' is not installed; installed: ",
        ),
        (
            {"rollout": {"engine": "vllm"}},
            "ConfigError",
            "rollout.engine.kind: 'vllm' is not installed; installed: ",
        ),
        (
            {"experience": {"group_size": 1}},
            "ConfigError",
            "experience.group_size: 1 with advantage 'grpo', which compares the episodes",
        ),
        (
            {"experience": {"max_staleness": -1}},
            "ConfigError",
            "experience.max_staleness: Input should be greater than or equal to 0 (got -1)",
        ),
    ],
)
async def test_a_wrong_job(
    gateway: Gateway, job: dict[str, Any], change: Change, kind: str, message: str
) -> None:
    response = await gateway.post(job | change)
    assert response.status_code == 422
    error = response.json()["error"]
    assert error["type"] == kind
    assert message in error["message"]
    assert not gateway.jobs.jobs


async def test_the_same_over_grpc(gateway: Gateway) -> None:
    request = pb.SubmitJobRequest(spec_json='{"name": 3}')
    with pytest.raises(ConfigError, match="name: Input should be a valid string"):
        await call(gateway.stub.SubmitJob, request)


async def test_all_problems_at_once(gateway: Gateway, job: dict[str, Any]) -> None:
    response = await gateway.post(
        job | {"reward": ["a", "b"], "trainer": {"objective": {"surrogate": "c"}}}
    )
    message = response.json()["error"]["message"]
    assert [part.split(":")[0] for part in message.split("; ") if "'" in part] == [
        "reward.0.kind",
        "reward.1.kind",
        "trainer.objective.surrogate.kind",
    ]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
async def test_an_incomplete_model(
    gateway: Gateway, job: dict[str, Any], model: Path, name: str
) -> None:
    (model / name).unlink()
    response = await gateway.post(job)
    assert response.status_code == 422
    assert response.json()["error"]["message"] == f"model.path: {model} has no {name}"


async def test_a_model_that_is_a_file(gateway: Gateway, job: dict[str, Any], model: Path) -> None:
    path = model / "config.json"
    response = await gateway.post(job | {"model": {"path": str(path)}})
    assert response.json()["error"]["message"] == f"model.path: {path} is not a folder"


async def test_a_broken_model(gateway: Gateway, job: dict[str, Any], model: Path) -> None:
    (model / "config.json").write_text("{")
    response = await gateway.post(job)
    assert "config.json is not JSON: " in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("media", "body", "message"),
    [
        ("application/json", "{", "job: not JSON: Expecting property name"),
        ("application/json", "", "job: not JSON: Expecting value"),
        ("application/yaml", "a: [", "job: not YAML at line 2, column 1"),
        ("application/yaml", "- 1", "Input should be a mapping"),
        ("application/json", " " * (1 << 21), "at most 1048576 bytes are allowed"),
        ("application/json", "[" * 100_000, "job: is nested too deeply"),
        ("application/yaml", "[" * 1000, "job: is nested too deeply"),
        (
            "application/yaml",
            "a: &a [1]\nb: [*a, *a]",
            "job: YAML at line 2, column 5: aliases (*name) are not accepted",
        ),
        ("application/yaml", "2026-01-01: 1", "2026-01-01: unknown field"),
    ],
)
async def test_a_body_that_is_no_job(gateway: Gateway, media: str, body: str, message: str) -> None:
    response = await gateway.http.post("/v1/jobs", content=body, headers={"content-type": media})
    error = response.json()["error"]
    assert message in error["message"]
    malformed = "not JSON" in message or "not YAML" in message
    assert (response.status_code, error["type"] == "MalformedError") == (
        (400, True) if malformed else (422, False)
    )


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v1/jobs?page_size=0", "page_size: Input should be greater than or equal to 1 (got '0')"),
        ("/v1/jobs?page_size=x", "page_size: Input should be a valid integer"),
        ("/v1/jobs?state=done", "Input should be 'queued', 'starting', 'running'"),
        ("/v1/jobs/x/trajectories?purpose=fun", "purpose: Input should be 'train' or 'eval'"),
    ],
)
async def test_a_wrong_query(gateway: Gateway, path: str, message: str) -> None:
    response = await gateway.http.get(path)
    assert response.status_code == 422
    assert response.json()["error"]["type"] == "InvalidError"
    assert message in response.json()["error"]["message"]


async def test_a_wrong_last_event_id(gateway: Gateway, job: dict[str, Any]) -> None:
    job_id = await gateway.submitted(job)
    response = await gateway.http.get(
        f"/v1/jobs/{job_id}/events", headers={"last-event-id": "soon"}
    )
    assert response.status_code == 422


async def test_a_path_that_does_not_exist(gateway: Gateway) -> None:
    response = await gateway.http.get("/v1/job")
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "GET /v1/job: Not Found"


async def test_a_method_that_is_not_allowed(gateway: Gateway) -> None:
    response = await gateway.http.put("/v1/jobs")
    assert response.status_code == 405
    assert response.json()["error"]["type"] == "InvalidError"


async def test_job_files_are_measured_as_they_come(gateway: Gateway, job: dict[str, Any]) -> None:
    """In bytes, on both ways in."""
    for number, kind, message in (
        (200_000, ConfigError, "x: unknown field"),
        (400_000, InvalidError, "job: is too large"),
    ):
        text = json.dumps(job | {"x": "漢" * number}, ensure_ascii=False)
        response = await gateway.http.post("/v1/jobs", content=text.encode())
        assert response.json()["error"]["message"].startswith(message)
        with pytest.raises(kind, match=message):
            await call(gateway.stub.SubmitJob, pb.SubmitJobRequest(spec_json=text))
