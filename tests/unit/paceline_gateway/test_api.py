from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from paceline.enums import JobState, Purpose, TokenSource, WorkerKind
from paceline.errors import NotFoundError, StateError
from paceline.platform.transport.rpc import stream
from paceline.types import (
    PolicyVersion,
    SamplingParams,
    Score,
    TokenSpan,
    Trajectory,
    Transcript,
    VersionRun,
)
from paceline.v1 import jobs_pb2 as pb
from paceline.v1 import types_pb2
from paceline.weights.placement import PublishedVersion, WeightHolder, WeightPlacement
from paceline.weights.route import RouteShape, TransferProgress
from paceline_gateway.http.events import lines
from paceline_harness.patience import PATIENCE_S, call

if TYPE_CHECKING:
    from conftest import Gateway
else:
    Gateway = Any

Doc = dict[str, Any]
TO_THE_END = (JobState.STARTING, JobState.RUNNING, JobState.SUCCEEDED)


async def test_submit_and_get(gateway: Gateway, job: Doc) -> None:
    response = await gateway.post(job)
    assert response.status_code == 201
    made = response.json()
    assert made["status"]["state"] == "queued"
    assert made["spec"]["experience"]["group_size"] == 8
    assert sorted(made["artifacts"]) == ["config.json", "tokenizer.json"]
    again = await gateway.http.get(f"/v1/jobs/{made['status']['job_id']}")
    assert again.json() == made


async def test_submit_yaml(gateway: Gateway, job: Doc) -> None:
    response = await gateway.http.post(
        "/v1/jobs",
        content=yaml.safe_dump(job),
        headers={"content-type": "application/yaml; charset=utf-8"},
    )
    assert response.status_code == 201
    assert response.json()["spec"]["name"] == "demo"


async def test_the_same_key_is_the_same_job(gateway: Gateway, job: Doc) -> None:
    keyed = [await gateway.post(job, **{"idempotency-key": "k"}) for _ in range(2)]
    other = await gateway.post(job)
    ids = [each.json()["status"]["job_id"] for each in (*keyed, other)]
    assert ids[0] == ids[1] != ids[2]


async def test_functions_of_modules_are_refused_by_their_fields(gateway: Gateway, job: Doc) -> None:
    own = {
        "reward": [
            {"kind": "my.rewards:score"},
            {"kind": "python", "function": "my.rewards:other"},
        ],
        "trainer": {"objective": {"surrogate": "my.objectives:mine"}},
    }
    response = await gateway.post(job | own)
    assert response.status_code == 422
    text = response.json()["error"]["message"]
    assert [
        line.split(" is not")[0] for line in text.split("; ") if " is not a function" in line
    ] == [
        "reward.0.kind: 'my.rewards:score'",
        "reward.1.function: 'my.rewards:other'",
        "trainer.objective.surrogate.kind: 'my.objectives:mine'",
    ]


async def test_list_by_tenant_and_state_in_pages(gateway: Gateway, job: Doc) -> None:
    for tenant in ("a", "b", "a", "a"):
        await gateway.submitted(job | {"tenant": tenant})
    await gateway.jobs.move("job-0", JobState.STARTING)
    page = (await gateway.http.get("/v1/jobs?tenant=a&state=queued&page_size=1")).json()
    assert [each["status"]["job_id"] for each in page["jobs"]] == ["job-2"]
    token = page["next_page_token"]
    rest = await gateway.http.get(f"/v1/jobs?tenant=a&state=queued&page_token={token}")
    assert [each["status"]["job_id"] for each in rest.json()["jobs"]] == ["job-3"]
    assert rest.json()["next_page_token"] == ""


@pytest.mark.parametrize("method", ["POST", "DELETE"])
async def test_cancel(gateway: Gateway, job: Doc, method: str) -> None:
    path = f"/v1/jobs/{await gateway.submitted(job)}"
    path += "/cancel?reason=enough" if method == "POST" else "?reason=enough"
    response = await gateway.http.request(method, path)
    assert response.status_code == 200
    status = response.json()["status"]
    assert (status["state"], status["reason"]) == ("cancelling", "enough")


async def test_cancel_a_finished_job(gateway: Gateway, job: Doc) -> None:
    job_id = await gateway.submitted(job)
    await gateway.jobs.move(job_id, *TO_THE_END)
    response = await gateway.http.post(f"/v1/jobs/{job_id}/cancel")
    assert response.status_code == 409
    assert response.json()["error"] == {
        "type": "StateError",
        "message": f"job {job_id} has already succeeded",
    }
    with pytest.raises(StateError, match="has already succeeded"):
        await call(gateway.stub.CancelJob, pb.CancelJobRequest(job_id=job_id))


@pytest.mark.parametrize("rest", ["", "/events", "/metrics", "/verify", "/weights"])
async def test_an_unknown_job(gateway: Gateway, rest: str) -> None:
    response = await gateway.http.get(f"/v1/jobs/nope{rest}")
    assert response.status_code == 404
    assert response.json()["error"] == {
        "type": "NotFoundError",
        "message": "job 'nope' is not known",
    }


async def test_an_unknown_job_over_grpc(gateway: Gateway) -> None:
    with pytest.raises(NotFoundError, match="job 'nope' is not known"):
        await call(gateway.stub.GetJob, pb.GetJobRequest(job_id="nope"))
    watching = stream(gateway.stub.WatchJob, pb.WatchJobRequest(job_id="nope"), timeout_s=60.0)
    with pytest.raises(NotFoundError, match="job 'nope' is not known"):
        await anext(watching)


async def test_metrics(gateway: Gateway, job: Doc) -> None:
    job_id = await gateway.submitted(job)
    for loss in (3.0, 2.0, 1.0):
        await gateway.jobs.measure(job_id, loss=loss)
    page = (await gateway.http.get(f"/v1/jobs/{job_id}/metrics?page_size=2")).json()
    assert [row["values"]["loss"] for row in page["rows"]] == [3.0, 2.0]
    rest = (await gateway.http.get(f"/v1/jobs/{job_id}/metrics?after={page['next']}")).json()
    assert [(row["index"], row["kind"]) for row in rest["rows"]] == [(2, "train")]
    assert rest["next"] == 0


def trajectory(purpose: Purpose) -> Trajectory:
    transcript = Transcript(
        tokens=(5, 6, 7),
        spans=(TokenSpan(0, 2, TokenSource.ENVIRONMENT), TokenSpan(2, 3, TokenSource.POLICY)),
        logprobs=(-0.5,),
        versions=(VersionRun(version=3, count=1),),
    )
    return Trajectory(
        group_id="g",
        index=1,
        attempt=1,
        task_id="t",
        purpose=purpose,
        transcripts=(transcript,),
        score=Score(reward=1.0, parts={"exact": 1.0}, raw_answer="7"),
        sampling=SamplingParams(max_tokens=4),
        response_text="7",
    )


async def test_trajectories(gateway: Gateway) -> None:
    gateway.jobs.trajectories = [trajectory(Purpose.TRAIN), trajectory(Purpose.EVAL)]
    page = (await gateway.http.get("/v1/jobs/j/trajectories?purpose=eval")).json()
    (found,) = page["trajectories"]
    assert (found["purpose"], found["response_text"]) == ("eval", "7")
    assert found["transcripts"][0]["tokens"] == [5, 6, 7]
    assert found["transcripts"][0]["spans"][1] == {"start": 2, "end": 3, "source": "policy"}
    assert found["score"]["parts"] == {"exact": 1.0}


async def test_audit(gateway: Gateway, job: Doc) -> None:
    job_id = await gateway.submitted(job)
    report = (await gateway.http.get(f"/v1/jobs/{job_id}/verify")).json()
    assert report == {
        "job_id": job_id,
        "ok": True,
        "counts": {"admitted": 0},
        "dropped": {},
        "problems": [],
    }


async def test_weights(gateway: Gateway, job: Doc) -> None:
    job_id = await gateway.submitted(job)
    empty = (await gateway.http.get(f"/v1/jobs/{job_id}/weights")).json()
    assert empty == {"versions": [], "holders": []}
    progress = TransferProgress(3, 1, 4, ("http://a",))
    holder = WeightHolder("r0", WorkerKind.ROLLOUT, "s", "http://b", transfers=(progress,))
    gateway.jobs.holdings = WeightPlacement((PublishedVersion(PolicyVersion(3, 2)),), (holder,))
    found = (await gateway.http.get(f"/v1/jobs/{job_id}/weights")).json()
    assert [each["version"]["version"] for each in found["versions"]] == [3]
    (shown,) = found["holders"]
    assert shown["transfers"] == [
        {"version": 3, "num_ready": 1, "num_chunks": 4, "sources": ["http://a"]}
    ]
    assert "key" not in str(found)


async def test_weights_on_the_command_line(gateway: Gateway, job: Doc) -> None:
    job_id = await gateway.submitted(job)
    url = str(gateway.http.base_url)
    code, text = await command("weights", job_id, "--url", url)
    assert (code, text) == (0, "no weights are published\n")
    here = TransferProgress(3, 1, 4, ("http://a:1",))
    holders = (
        WeightHolder("", WorkerKind.TRAINER, "s", "http://t:1"),
        WeightHolder("r0", WorkerKind.ROLLOUT, "s", "http://b:1", 2, (here,), (), 25e6, "slow"),
    )
    published = PublishedVersion(
        PolicyVersion(3, 2, num_bytes=64 << 20), 1 << 20, RouteShape.CHAIN, 2.5, 0.125
    )
    gateway.jobs.holdings = WeightPlacement((published,), holders)
    code, text = await command("weights", job_id, "--url", url)
    rows = [line.split() for line in text.splitlines()]
    assert code == 0
    assert rows[1] == ["3", "2", "64.0", "1", "chain", "2.50", "12%"]
    assert rows[3] == ["seed", "http://t:1", "s"]
    assert rows[4] == ["r0", "s", "2", "3", "1/4", "http://a:1", "25.0", "slow"]
    assert (await command("weights", "nope", "--url", url))[0] == 2


TOKEN = "pl_bootstrap_of_these_tests"


async def command(*words: str) -> tuple[int | None, str]:
    """What `paceline` prints on a wide terminal, and its exit code."""
    made = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "paceline.front.cli", *words),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"COLUMNS": "200", "PACELINE_TOKEN": TOKEN},
    )
    text, _ = await asyncio.wait_for(made.communicate(), PATIENCE_S)
    return made.returncode, text.decode()


async def read_events(gateway: Gateway, job_id: str, **headers: str) -> list[Doc]:
    path = f"/v1/jobs/{job_id}/events"
    found: list[Doc] = []
    async with gateway.http.stream("GET", path, headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        block: Doc = {}
        async for line in response.aiter_lines():
            name, _, value = line.partition(": ")
            if line:
                block[name] = json.loads(value) if name == "data" else value
            else:
                found.append(block)
                block = {}
    return found


async def test_events_until_the_end(gateway: Gateway, job: Doc) -> None:
    job_id = await gateway.submitted(job)
    reading = asyncio.create_task(read_events(gateway, job_id))
    await gateway.jobs.move(job_id, JobState.STARTING, JobState.RUNNING)
    await gateway.jobs.measure(job_id, loss=1.0)
    await gateway.jobs.measure(job_id, loss=0.5)
    await gateway.jobs.move(job_id, JobState.SUCCEEDED)
    found = await reading
    assert found[-1] == {"event": "end", "data": {}}
    assert (found[-2]["id"], found[-2]["data"]["status"]["state"]) == ("2", "succeeded")
    losses = [r["values"]["loss"] for e in found[:-1] for r in e["data"]["metrics"]]
    assert losses == [1.0, 0.5]


async def test_events_resume_where_they_stopped(gateway: Gateway, job: Doc) -> None:
    job_id = await gateway.submitted(job)
    for loss in (3.0, 2.0, 1.0):
        await gateway.jobs.measure(job_id, loss=loss)
    await gateway.jobs.move(job_id, *TO_THE_END)
    first = (await read_events(gateway, job_id, **{"last-event-id": "2"}))[0]
    assert (first["id"], len(first["data"]["metrics"])) == ("3", 1)
    assert first["data"]["live"]["counts"] == {"queued": 1}


async def test_event_streams_send_keepalives() -> None:
    async def slow() -> AsyncIterator[pb.JobEvent]:
        await asyncio.sleep(0.05)
        for event in list[pb.JobEvent]():
            yield event

    first = pb.JobEvent()
    first.status.state = types_pb2.JOB_STATE_RUNNING
    found = [line async for line in lines(first, slow(), seen=7, keep_alive_s=0.01)]
    assert found[0].startswith("id: 7\ndata: {")
    assert found[1] == ": still here\n\n"
    assert found[-1] == "event: end\ndata: {}\n\n"


async def test_watch_over_grpc(gateway: Gateway, job: Doc) -> None:
    job_id = await gateway.submitted(job)
    await gateway.jobs.measure(job_id, loss=1.0)
    await gateway.jobs.move(job_id, *TO_THE_END)
    watching = pb.WatchJobRequest(job_id=job_id)
    events = [e async for e in stream(gateway.stub.WatchJob, watching, timeout_s=60.0)]
    assert [(e.status.state, len(e.metrics)) for e in events] == [
        (types_pb2.JOB_STATE_SUCCEEDED, 1)
    ]


async def test_the_same_operations_over_grpc(gateway: Gateway, job: Doc) -> None:
    stub = gateway.stub
    request = pb.SubmitJobRequest(spec_json=json.dumps(job), request_id="r")
    job_id = (await call(stub.SubmitJob, request)).status.job_id
    gateway.jobs.trajectories = [trajectory(Purpose.TRAIN)]
    assert [j.status.name for j in (await call(stub.ListJobs, pb.ListJobsRequest())).jobs] == [
        "demo"
    ]
    assert (await call(stub.VerifyJob, pb.VerifyJobRequest(job_id=job_id))).ok
    assert not (await call(stub.ListMetrics, pb.ListMetricsRequest(job_id=job_id))).rows
    wanted = pb.ListTrajectoriesRequest(job_id=job_id)
    assert len((await call(stub.ListTrajectories, wanted)).trajectories) == 1
    cancelled = await call(stub.CancelJob, pb.CancelJobRequest(job_id=job_id))
    assert cancelled.status.state == types_pb2.JOB_STATE_CANCELLING


async def test_files_may_be_sent_with_a_job(gateway: Gateway, job: Doc) -> None:
    remote = json.dumps(job | {"model": {"path": "/on/the/trainer"}})
    files = {"config.json": b"{}", "tokenizer.json": b"[]"}
    request = pb.SubmitJobRequest(spec_json=remote, files=files)
    made = await call(gateway.stub.SubmitJob, request)
    assert gateway.jobs.files[made.status.job_id] == files


async def test_health(gateway: Gateway) -> None:
    assert (await gateway.http.get("/livez")).json() == {"status": "ok"}
    # It may be too busy to ask its upstream in time, but not for ever.
    while (told := await gateway.http.get("/readyz")).status_code == 503:
        await asyncio.sleep(0.1)
    assert told.json() == {"status": "ready"}


async def test_openapi(gateway: Gateway) -> None:
    document = (await gateway.http.get("/openapi.json")).json()
    assert "/v1/jobs/{job_id}/events" in document["paths"]
    schemas = document["components"]["schemas"]
    assert {"JobSpec", "ExperienceSpec", "JobView", "Trajectory", "ErrorView"} <= set(schemas)
    text = json.dumps(document)
    for reference in set(text.split('"#/components/schemas/')[1:]):
        assert reference.split('"')[0] in schemas
    page = await gateway.http.get("/docs")
    assert "script-src 'self'" in page.headers["content-security-policy"]
    needed = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(needed) == 4
    assert "<script>" not in page.text
    for each in needed:
        assert "//" not in each
        assert (await gateway.http.get(f"/{each}")).status_code == 200
    assert (await gateway.http.get("/docs/..%2f..%2fcore.py")).status_code == 404


async def test_the_gateway_publishes_its_address(gateway: Gateway, tmp_path: Path) -> None:
    told = json.loads((tmp_path / "gateway.json").read_text())
    assert told["http"] == str(gateway.http.base_url).rstrip("/")
    assert told["grpc"] == gateway.chassis.address
