"""A job without the SDK: REST over plain HTTP, gRPC with the checked-in stubs."""

import json
import re
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from paceline.v1 import jobs_pb2 as pb
from paceline.v1 import jobs_pb2_grpc as pb_grpc
from paceline.v1 import types_pb2
from paceline_harness.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
JOB_S = PATIENCE_S


def test_rest_submits_watches_and_pages(platform: Any, tiny_job: Callable[..., Any]) -> None:
    job = tiny_job(name="rest", stop={"steps": 6})
    with httpx.Client(base_url=platform.http, headers=platform.headers, timeout=JOB_S) as http:
        made = http.post("/v1/jobs", json=job, headers={"idempotency-key": "one"})
        assert made.status_code == 201, made.text
        job_id = made.json()["status"]["job_id"]
        again = http.post("/v1/jobs", json=job, headers={"idempotency-key": "one"})
        assert again.json()["status"]["job_id"] == job_id
        with http.stream("GET", f"/v1/jobs/{job_id}/events") as events:
            data = [json.loads(x[5:]) for x in events.iter_lines() if x.startswith("data:")]
        assert [d["status"]["state"] for d in data if "status" in d][-1] == "succeeded"
        rows = http.get(f"/v1/jobs/{job_id}/metrics").json()["rows"]
        assert [r["step"] for r in rows if r["kind"] == "eval"] == [0, 6]
        assert len([r for r in rows if r["kind"] == "train"]) == 6
        page = http.get(f"/v1/jobs/{job_id}/trajectories", params={"page_size": 5}).json()
        assert len(page["trajectories"]) == 5
        assert page["next_page_token"]
        first = page["trajectories"][0]["transcripts"][0]
        assert first["spans"][0]["start"] == 0
        assert first["spans"][-1]["end"] == len(first["tokens"])
        over = http.post(f"/v1/jobs/{job_id}/cancel")
        assert over.status_code == 409
        assert "succeeded" in over.json()["error"]["message"]
        assert http.get("/v1/jobs/nope").status_code == 404


def test_grpc_does_the_same(platform: Any, tiny_job: Callable[..., Any]) -> None:
    with grpc.insecure_channel(platform.grpc) as channel:
        jobs, who = pb_grpc.JobsStub(channel), tuple(platform.headers.items())
        wanted = tiny_job(name="grpc", eval=None, stop={"steps": 2000})
        wanted["experience"]["max_staleness"] = 50  # so that some are always being played
        spec = json.dumps(wanted)
        job = jobs.SubmitJob(pb.SubmitJobRequest(spec_json=spec), timeout=PATIENCE_S, metadata=who)
        job_id = job.status.job_id
        for event in jobs.WatchJob(pb.WatchJobRequest(job_id=job_id), timeout=JOB_S, metadata=who):
            if event.status.step >= 2:
                break
        jobs.CancelJob(
            pb.CancelJobRequest(job_id=job_id, reason="enough"), timeout=PATIENCE_S, metadata=who
        )
        states = [
            event.status.state
            for event in jobs.WatchJob(
                pb.WatchJobRequest(job_id=job_id), timeout=JOB_S, metadata=who
            )
        ]
        assert states[-1] == types_pb2.JOB_STATE_CANCELLED
        report = jobs.VerifyJob(
            pb.VerifyJobRequest(job_id=job_id), timeout=PATIENCE_S, metadata=who
        )
        assert report.ok, list(report.problems)
        assert report.dropped["cancelled"] > 0
        with pytest.raises(grpc.RpcError) as caught:
            jobs.GetJob(pb.GetJobRequest(job_id="nope"), timeout=PATIENCE_S, metadata=who)
        assert "nope" in str(caught.value)


def test_a_source_without_tasks_is_refused_at_submit(
    platform: Any, tiny_job: Callable[..., Any]
) -> None:
    tasks = {"environment": "arithmetic", "options": {"digits": 1, "size": 0}}
    job, url = tiny_job(tasks=tasks), f"{platform.http}/v1/jobs"
    refused = httpx.post(url, json=job, headers=platform.headers, timeout=PATIENCE_S)
    assert refused.status_code == 422
    assert "has no tasks" in refused.json()["error"]["message"]


def test_a_model_that_cannot_be_computed_is_refused_at_submit(
    platform: Any, tiny_job: Callable[..., Any], tmp_path: Path
) -> None:
    job, url = tiny_job(), f"{platform.http}/v1/jobs"
    folder = Path(shutil.copytree(job["model"]["path"], tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text()) | {"hidden_act": "wave"}
    (folder / "config.json").write_text(json.dumps(config))
    job["model"]["path"] = str(folder)
    refused = httpx.post(url, json=job, headers=platform.headers, timeout=PATIENCE_S)
    assert refused.status_code == 422, refused.text
    assert "cannot train it (KeyError: 'wave')" in refused.json()["error"]["message"]


def test_an_overlong_prompt_fails_the_job_with_a_reason(
    platform: Any, tiny_job: Callable[..., Any]
) -> None:
    job = tiny_job(name="long", sampling={"max_tokens": 2, "max_context": 3})
    with platform.client() as client:
        job_id = client.submit(job).status.job_id
        status = client.wait(job_id, timeout_s=JOB_S).status
    assert status.state == "failed"
    assert "does not fit max_context 3" in status.reason


def in_bfloat16(job: dict[str, Any]) -> dict[str, Any]:
    """In which each way to the same log-probs rounds them in its own way."""
    job["model"] |= {"dtype": "bfloat16"}
    return job


def test_a_job_ends_whose_engine_has_half_as_much_noise_again_as_the_trainer(
    platform: Any, tiny_job: Callable[..., Any]
) -> None:
    engine = {"kind": "inexact", "noise": 1.5}
    job = in_bfloat16(tiny_job(name="noisy", rollout={"engine": engine}))
    with platform.client() as client:
        job_id = client.submit(job).status.job_id
        status = client.wait(job_id, timeout_s=JOB_S).status
    assert (status.state, status.step) == ("succeeded", 20), status.reason


def test_an_engine_that_never_agrees_with_the_trainer_ends_the_job_with_the_figures(
    platform: Any, tiny_job: Callable[..., Any]
) -> None:
    """Its weights are wrong after their bytes were verified."""
    engine = {"kind": "inexact", "fault": "swapped shards"}
    job = in_bfloat16(tiny_job(name="disagrees", rollout={"engine": engine}))
    with platform.client() as client:
        job_id = client.submit(job).status.job_id
        status = client.wait(job_id, timeout_s=JOB_S).status
    assert status.state == "failed"
    assert re.fullmatch(
        r"canary: trim \S+, noise \S+, ratio \S+, allowed 2(; unequal tensors: .*)?; "
        r"all rollout workers refuse version 2, and have refused the 2 before it",
        status.reason,
    )
    assert not status.step


def test_a_synchronous_job_goes_on_after_versions_that_no_engine_accepts(
    platform: Any, tiny_job: Callable[..., Any]
) -> None:
    """The first one, and two of a later step."""
    wrong = [0, 3, 4]
    engine = {"kind": "inexact", "fault": "swapped shards", "versions": wrong}
    job = in_bfloat16(tiny_job(name="withdrawn", rollout={"engine": engine}, stop={"steps": 4}))
    job["experience"]["max_staleness"] = 0
    with platform.client() as client:
        job_id = client.submit(job).status.job_id
        status = client.wait(job_id, timeout_s=JOB_S).status
        assert (status.state, status.step) == ("succeeded", 4), status.reason
        listed = client.list_trajectories(job_id, page_size=200)
    sampled = {
        run.version for each in listed.trajectories for t in each.transcripts for run in t.versions
    }
    assert sampled == {1, 2, 5, 6}


def test_the_worker_of_two_whose_tokens_are_wrong_starts_again_and_the_job_goes_on(
    platform: Any, tiny_job: Callable[..., Any], until: Callable[..., None]
) -> None:
    """Its canary is right, so nothing but the trainer can tell."""
    engine = {"kind": "inexact", "off_by": 0.45, "worker": "-1"}
    job = tiny_job(name="mismatch", rollout={"engine": engine, "replicas": 2}, eval=None)
    with platform.client() as client:
        job_id = client.submit(job | {"stop": {"steps": 100_000}}).status.job_id
        told = rf"rollout-{job_id}-1 (failed|is quarantined) .*: RefusedWeightsError: the trainer"
        deadline, reasons = time.monotonic() + JOB_S, list[str]()
        while not re.match(told, (status := client.get(job_id).status).reason):
            reasons += [status.reason] if status.reason not in reasons else []
            assert not status.state.terminal, (status.state, reasons)
            assert time.monotonic() < deadline, (status.state, status.step, reasons)
            time.sleep(0.05)
        until(lambda: client.get(job_id).status.step > status.step + 3, "stopped", JOB_S)
        rows = client.history(job_id).rows
        client.cancel(job_id)
        client.wait(job_id, timeout_s=JOB_S)
    said = r"agrees with other workers: mismatch_kl is 0\.1\d+, allowed 0\.05"
    assert re.search(said, status.reason), status.reason
    worst = max(row.values.get("mismatch_kl_worst", 0.0) for row in rows)
    assert 0.1 < worst < 0.2


def test_it_listens_on_loopback_only(platform: Any) -> None:
    listening: set[str] = set()
    for pid in platform.pids().values():
        with suppress(psutil.NoSuchProcess):
            found = psutil.Process(pid).net_connections("inet")
            listening |= {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}
    assert listening
    assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_what_it_leaves_is_of_its_owner_only(platform: Any) -> None:
    """Every file, and every folder of the run directory; those below cannot be reached."""
    files = folders = 0
    for path in platform.run_dir.rglob("*"):
        with suppress(FileNotFoundError):  # it is at work
            mode = path.lstat().st_mode
            files += stat.S_ISREG(mode)
            is_first = stat.S_ISDIR(mode) and path.parent == platform.run_dir
            folders += is_first
            if stat.S_ISREG(mode) or is_first:
                assert not mode & 0o077, (path, oct(mode))
    assert files > 5
    assert folders > 3
