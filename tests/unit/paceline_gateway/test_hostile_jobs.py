from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from paceline.errors import ConfigError, InvalidError
from paceline.v1 import jobs_pb2 as pb
from paceline.v1 import types_pb2
from paceline_harness.patience import PATIENCE_S, call

if TYPE_CHECKING:
    from conftest import Gateway
else:
    Gateway = Any

MEBI = 1 << 20
ANSWER_S = PATIENCE_S
WIDE = "(?i)" + r"[\U00000001-\U0010ffff]" * 80


def changes() -> dict[str, dict[str, Any]]:
    """What is wrong with a job, by what its message says."""
    return {
        "model.path: String should have at most 1024": {"model": {"path": "x" * 5_000}},
        "File name too long": {"model": {"path": "/tmp/" + "x" * 900}},
        "the character NUL": {"model": {"path": "/tmp/\0"}},
        "half of a surrogate pair": {"name": "\ud800"},
        "not a regular expression: maximum recursion": _pattern("(" * 900),
        "not a regular expression: the repetition number is too large": _pattern(
            "x{0,99999999999}"
        ),
        "not a regular expression: takes too long": {
            "reward": [
                {"kind": "regex", "name": str(n), "pattern": f"{WIDE}{n}"} for n in range(32)
            ]
        },
        "not a regular expression: has 2001 characters": _pattern("x" * 2_001),
        "experience.batch_groups: Input should be a valid integer (got true)": {
            "experience": {"batch_groups": True}
        },
        "reward.0.weight: Input should be a valid number (got false)": {
            "reward": [{"kind": "exact", "weight": False}]
        },
        "two parts are named 'exact'": {"reward": ["exact"] * 32},
        "and 98": {str(number): 1 for number in range(1_000)},
        "at most 64 levels": {"tasks": json.loads("[" * 70 + "]" * 70)},
        "at most 20000 are allowed": {"tasks": {"options": {"a": [0] * 20_000}}},
        "does not fit into 64 bits": {"stop": {"steps": 10**30}},
        "unknown field": {"x" * 100_000: 1},
        "\\ud800": {"name": "a", "\\ud800\n\u2028": 1},
    }


def _pattern(text: str) -> dict[str, Any]:
    return {"reward": [{"kind": "regex", "pattern": text}]}


@pytest.mark.parametrize("message", changes())
async def test_a_job_that_means_harm(gateway: Gateway, job: dict[str, Any], message: str) -> None:
    text = json.dumps(job | changes()[message])
    response = await gateway.http.post("/v1/jobs", content=text)
    assert response.status_code == 422, response.text
    assert message in response.json()["error"]["message"]
    assert len(response.content) < 10_000
    request = pb.SubmitJobRequest(spec_json=text)
    with pytest.raises(InvalidError) as caught:
        await call(gateway.stub.SubmitJob, request, timeout_s=ANSWER_S)
    assert caught.value.message[:1_000] == response.json()["error"]["message"][:1_000]
    assert not gateway.jobs.jobs


async def test_a_patient_pattern_is_accepted(gateway: Gateway, job: dict[str, Any]) -> None:
    await gateway.submitted(job | _pattern(r"(?i)<answer>(?P<answer>[^<]{1,200})</answer>"))
    await gateway.submitted(job | _pattern(r"[\u4e00-\u9fff]+ (?P<answer>\d+)"))


@pytest.mark.parametrize(
    "data", [b"[" * 100_000, b"[" + b"[]," * 3_000_000 + b"[]]", b"\xff", b"{", b""]
)
async def test_a_tokenizer_that_means_harm(
    gateway: Gateway, job: dict[str, Any], data: bytes
) -> None:
    request = pb.SubmitJobRequest(
        spec_json=json.dumps(job), files={"config.json": b"{}", "tokenizer.json": data}
    )
    with pytest.raises(ConfigError, match=r"^model\.path: files: tokenizer\.json"):
        await call(gateway.stub.SubmitJob, request, timeout_s=PATIENCE_S)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/jobs/x/metrics?after=354250304105989013504"),
        ("GET", "/v1/jobs/x/metrics?after=-1"),
        ("GET", f"/v1/jobs/x/metrics?after={2**63}"),
        ("GET", f"/v1/jobs?page_token={'1' * 5_000}"),
        ("GET", f"/v1/jobs?tenant={quote(chr(0))}"),
        ("GET", f"/v1/jobs?page_size={quote(chr(0x661))}"),
        ("POST", f"/v1/jobs/x/cancel?reason={'x' * 5_000}"),
        ("GET", f"/v1/jobs/{'x' * 5_000}"),
    ],
)
async def test_a_query_that_means_harm(gateway: Gateway, method: str, path: str) -> None:
    response = await gateway.http.request(method, path)
    assert response.status_code == 422, response.text
    assert response.json()["error"]["type"] == "InvalidError"


@pytest.mark.parametrize(
    ("body", "headers", "message"),
    [
        ("{", {}, "body: not JSON: "),
        ("[" * 15_000, {}, "body: is nested too deeply"),
        ('{"name": "\\ud800"}', {}, "surrogate"),
        ('{"name": "a", "expires_in_s": true}', {}, "expires_in_s: Input should be a valid number"),
        ("x" * 20_000, {}, "body: is too large; at most 16384 bytes are allowed"),
        ("{}", {"content-encoding": "gzip"}, "content-encoding: 'gzip' is not accepted"),
        ("{}", {"content-type": "text/plain"}, "Input should be a mapping"),
    ],
)
async def test_a_body_that_means_harm(
    gateway: Gateway, body: str, headers: dict[str, str], message: str
) -> None:
    given = {"content-type": "application/json"} | headers
    response = await gateway.http.post("/v1/tokens", content=body, headers=given)
    assert response.status_code == (400 if "not JSON" in message else 422), response.text
    assert message in response.json()["error"]["message"]


async def test_every_number_of_a_query_has_bounds(gateway: Gateway) -> None:
    document = (await gateway.http.get("/openapi.json")).json()
    numbers = {
        (path, each["name"]): {"minimum", "maximum"} <= set(each["schema"])
        for path, methods in document["paths"].items()
        for method in methods.values()
        for each in method.get("parameters", ())
        if each["schema"].get("type") in ("integer", "number")
    }
    assert len(numbers) >= 6
    assert all(numbers.values()), numbers


async def test_a_quota_of_false_is_none(gateway: Gateway) -> None:
    response = await gateway.http.put("/v1/tenants/a/quota", json={"episodes": False})
    assert response.status_code == 422
    message = "episodes: Input should be a valid integer (got false)"
    assert response.json()["error"]["message"] == message


async def test_a_long_reason_is_refused_over_grpc(gateway: Gateway) -> None:
    request = pb.CancelJobRequest(job_id="x", reason="x" * 2_000)
    with pytest.raises(InvalidError, match=r"reason: has 2000 characters; at most 1000"):
        await call(gateway.stub.CancelJob, request)
    with pytest.raises(InvalidError, match="at most 65536 are allowed"):
        await call(gateway.stub.CancelJob, pb.CancelJobRequest(reason="x" * MEBI))
    states = [types_pb2.JOB_STATE_QUEUED] * 2_000
    with pytest.raises(InvalidError, match="state: has 2000 items; at most"):
        await call(gateway.stub.ListJobs, pb.ListJobsRequest(state=states))
    files = {str(number): b"" for number in range(2_000)}
    with pytest.raises(InvalidError, match="too many parts"):
        await call(gateway.stub.SubmitJob, pb.SubmitJobRequest(files=files))


async def test_a_number_that_is_no_state_is_refused_over_grpc(gateway: Gateway) -> None:
    unknown: Any = 99
    with pytest.raises(InvalidError, match="state: 99 is not known; allowed: queued, "):
        await call(gateway.stub.ListJobs, pb.ListJobsRequest(state=[unknown]))
