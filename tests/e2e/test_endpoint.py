"""A model behind an outside endpoint is measured although services are killed, and nothing else."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from paceline.errors import InvalidError, UnavailableError
from paceline.front.cli.entry import main
from paceline_harness.patience import PATIENCE_S
from paceline_harness.processes import goes_on
from paceline_harness.servers.chat import JudgeServer, Reply, serving
from paceline_harness.servers.completions import completion, refusal, strict

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
KEY, MODEL = "sk-of-the-operator", "small-model"
TASKS, SAMPLES, TURNS = 10, 2, 2
KINDS = ("environment", "experience", "reward", "gateway", "controller")
FREE = 16  # requests that are answered before the gate opens


class Outside:
    """What the server does: each fifth request is too much, and later ones wait for the gate.

    With `denies` it answers later ones with that instead.
    """

    def __init__(self) -> None:
        self.denies: Reply | None = None
        self.gate = threading.Event()
        self._numbers, self._lock = count(1), threading.Lock()
        self.waits = 0

    def answer(self, body: dict[str, Any]) -> Reply:
        with self._lock:
            number = next(self._numbers)
            self.waits += number > FREE
        if number % 5 == 0:
            return refusal(429, "slow down", **{"retry-after": "1"})
        if number > FREE and self.denies is not None:
            return self.denies
        if number > FREE:
            self.gate.wait(PATIENCE_S)
        return completion(f"answer {len(body['messages'])}")


@pytest.fixture
def outside() -> Iterator[Outside]:
    made = Outside()
    yield made
    made.gate.set()


@pytest.fixture
def server(outside: Outside) -> Iterator[JudgeServer]:
    with serving(strict(outside.answer, model=MODEL)) as made:
        yield made


@pytest.fixture
def platform(
    server: JudgeServer, tmp_path: Path, start_platform: Callable[..., Any]
) -> Iterator[Any]:
    (tmp_path / "key").write_text(KEY)
    settings = {
        "base_url": server.url,
        "key_file": str(tmp_path / "key"),
        "timeout_s": 3 * PATIENCE_S,
    }
    file = tmp_path / "endpoints.yaml"
    file.write_text(yaml.safe_dump({"endpoints": {"outside": settings}}))
    made = start_platform(tmp_path / "run", "--endpoints", str(file))
    yield made
    made.stop()


def measuring(tiny_job: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    sampled = {"tasks": TASKS, "samples": SAMPLES, "temperature": 1.0, "timeout_s": 3600.0}
    made = tiny_job(name="outside", kind="eval", reward=[{"kind": "environment"}])
    made["model"] = {"path": MODEL, "endpoint": {"name": "outside", "concurrency": 4}}
    made["tasks"] = {"environment": "talking", "options": {"turns": TURNS}}
    return made | {"eval": sampled}


def test_each_episode_is_there_once_whatever_is_killed(
    platform: Any,
    outside: Outside,
    server: JudgeServer,
    tiny_job: Callable[..., dict[str, Any]],
    until: Callable[..., None],
    tmp_path: Path,
) -> None:
    job = measuring(tiny_job)
    with platform.client() as client:
        with pytest.raises(InvalidError, match=r"'other' is not one of .* endpoints: outside"):
            client.submit(job | {"model": {"path": MODEL, "endpoint": {"name": "other"}}})
        with pytest.raises(InvalidError, match="outside endpoint has no weights to train"):
            client.submit(job | {"kind": "train"})
        job_id = client.submit(job).status.job_id
        until(lambda: outside.waits, "no request", PATIENCE_S)

        def running(kind: str) -> list[psutil.Process]:
            pids = platform.pids(kind, "").values()
            return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]

        def asked_again(before: int) -> bool:
            with suppress(UnavailableError):
                return len(server.requests) > before
            return False

        for kind in KINDS:
            victim, before = running(kind)[0], len(server.requests)
            victim.kill()
            until(lambda victim=victim: not goes_on(victim), f"{kind} lives on")
            until(
                lambda kind=kind, victim=victim: any(
                    goes_on(each) and each != victim for each in running(kind)
                ),
                f"no new {kind}",
                120,
            )
            if kind == "environment":  # its episodes go on in another one
                until(lambda before=before: asked_again(before), "nobody asks", PATIENCE_S)
        outside.gate.set()
        status = client.wait(job_id, timeout_s=PATIENCE_S).status
        assert (status.state, status.reason) == ("succeeded", "all tasks are measured")
        assert (status.version, status.incarnation) == (-1, 0)
        [row] = client.list_metrics(job_id).rows
        assert (row.values["measured"], row.values["reward"]) == (TASKS, TURNS)
        assert row.values["models"] == {"served-2026": TASKS * SAMPLES}
        page = client.list_trajectories(job_id, page_size=100, purpose="eval")
        places = sorted((each.group_id, each.index) for each in page.trajectories)
        wanted = [(f"{job_id}.e0.{task}", n) for task in range(TASKS) for n in range(SAMPLES)]
        assert places == sorted(wanted)
        for each in page.trajectories:
            replies = [reply.text for reply in each.transcripts[0].replies]
            assert replies == ["answer 1", "answer 3"]
        report = client.verify(job_id)
        assert report.ok, report.problems
    assert {kind for kind in ("trainer", "rollout") if platform.pids(kind, job_id)} == set()
    assert set(server.keys) == {f"Bearer {KEY}"}
    for path in platform.run_dir.rglob("*"):
        if path.is_file() and os.access(path, os.R_OK):
            assert KEY.encode() not in path.read_bytes(), path
    check_generated(platform, tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (refusal(401, f"Incorrect API key provided: {KEY}"), "HTTP 401: .*provided: \\*\\*\\*"),
        (refusal(404, "no such model", code="model_not_found"), "HTTP 404: .*no such model"),
    ],
    ids=["key", "model"],
)
def test_a_key_or_model_that_the_endpoint_refuses_ends_the_job_at_once(
    platform: Any,
    outside: Outside,
    server: JudgeServer,
    tiny_job: Callable[..., dict[str, Any]],
    answer: Reply,
    says: str,
) -> None:
    """It has answered some tasks before: a key may be withdrawn while a job uses it."""
    outside.denies = answer
    with platform.client() as client:
        job_id = client.submit(measuring(tiny_job)).status.job_id
        status = client.wait(job_id, timeout_s=PATIENCE_S).status
        assert status.state == "failed"
        assert re.fullmatch(f"endpoint 'outside': {says}.*", status.reason), status.reason
        assert client.verify(job_id).ok
    assert len(server.requests) < TASKS * SAMPLES * TURNS


def check_generated(platform: Any, path: Path) -> None:
    """`paceline generate` writes what the same endpoint answers."""
    words = ("--endpoint", "outside", "--env", "talking", "--option", f"turns={TURNS}")
    before = signal.getsignal(signal.SIGTERM)
    more = ("--tasks", "3", "--samples", "2", "--out", str(path), "--quiet")
    assert main(["generate", MODEL, *words, *more, "--run-dir", str(platform.run_dir)]) == 0
    signal.signal(signal.SIGTERM, before)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["task"], row["sample"]) for row in rows] == [divmod(n, 2) for n in range(6)]
    for row in rows:
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * TURNS
        assert (row["model"], row["completion_tokens"]) == ("served-2026", 16)
        assert row["completion_ids"] is None
