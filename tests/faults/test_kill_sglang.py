"""SIGKILL of an SGLang server, and of its worker, during generation.

Every token that ever arrived from a rollout worker is in a trained trajectory: none comes twice.
"""

import json
import os
import re
import signal
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest

from paceline_harness.patience import PATIENCE_S

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(2400)]
STEPS, EPISODES = 16, 16


def sglang_job(make: Callable[..., dict[str, Any]], name: str) -> dict[str, Any]:
    """Long answers, one batch at a time, nothing left over."""
    engine = {"kind": "sglang", "device": "cpu", "cache_tokens": 4096}
    job = make(
        name=name,
        eval=None,
        sampling={"max_tokens": 48, "max_context": 64, "on_truncation": "score"},
        rollout={"engine": engine, "replicas": 2, "max_concurrent": 16},
        stop={"steps": STEPS},
    )
    sync = {"max_staleness": 0, "batch_groups": 4, "group_size": EPISODES // 4}
    # An environment worker that has to wait for the processor keeps what it has.
    sync |= {"lease_s": 60}
    job["experience"] = job["experience"] | sync
    for part in ("model", "trainer"):
        # In bfloat16, log-probs depend on the rows that are computed together.
        job[part] = job[part] | {"dtype": "float32"}
    return job


def servers(platform: Any, job_id: str) -> Iterator[tuple[int, psutil.Process]]:
    """Of each rollout worker of a job whose SGLang server has begun: its pid and that server.

    The HTTP process of a server is the child of its guard.
    """
    for worker in platform.pids("rollout", job_id).values():
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(worker).children(recursive=True):
                if any(part.endswith("guard.py") for part in process.cmdline()):
                    yield from ((worker, server) for server in process.children()[:1])


def in_mid_episode(server: psutil.Process) -> bool:
    """Whether several running requests have progressed well beyond their five prompt tokens."""
    with suppress(psutil.NoSuchProcess, OSError):  # it ends with its job
        words = [word for word in server.cmdline() if word.startswith("--port=")]
        port = "".join(words).removeprefix("--port=")
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/v1/loads", timeout=PATIENCE_S
        ) as reply:
            load = json.load(reply)["loads"][0]
        running = int(load["num_running_reqs"])
        return running >= 2 and int(load["num_used_tokens"]) >= 8 * running
    return False


def started(platform: Any, process: str) -> bool:
    """Whether a process already exports metrics."""
    with suppress(KeyError, FileNotFoundError, OSError):
        counter(platform, process, "paceline_received_tokens")
        return True
    return False


def counter(platform: Any, process: str, name: str) -> float:
    """The sum of a counter of one process over all its series."""
    port = json.loads((platform.run_dir / "ports.json").read_text())[f"{process}:metrics"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as reply:
        lines = reply.read().decode().splitlines()
    found = [re.match(rf"{name}_total(?:{{.*}})? (\S+)", line) for line in lines]
    return sum(float(each[1]) for each in found if each)


@pytest.mark.parametrize("victim", ["server", pytest.param("worker", marks=pytest.mark.extended)])
def test_no_token_is_sampled_again(
    victim: str,
    platform: Any,
    tiny_job: Callable[..., Any],
    sglang_python: str,
    until: Callable[..., None],
) -> None:
    """On a busy machine requests may finish before the kill; then it is retried."""
    tokens = ("paceline_received_tokens", "paceline_resumed_tokens")
    until(lambda: started(platform, "environment-0"), "no environment worker", PATIENCE_S)
    for number in range(3):
        before = [counter(platform, "environment-0", name) for name in tokens]
        job = sglang_job(tiny_job, f"kill-sglang-{victim}-{number}")
        summary = killed(victim, job, platform, until)
        after = [counter(platform, "environment-0", name) for name in tokens]
        received, resumed = (now - then for now, then in zip(after, before, strict=True))
        assert summary["episodes_trained"] == STEPS * EPISODES
        assert not summary["episodes_dropped"]
        assert received == summary["tokens_generated"] > 0
        assert summary["logprob_diff_max"] <= 1e-4
        if resumed:
            return
    pytest.fail("it died at other moments")


def killed(
    victim: str, job: dict[str, Any], platform: Any, until: Callable[..., None]
) -> dict[str, Any]:
    """The summary of a job whose server or worker is killed while episodes run in it."""
    with platform.client() as client:
        job_id = client.submit(job).status.job_id
        until(lambda: client.get(job_id).status.step >= 1, "no progress", PATIENCE_S)
        busy: list[tuple[int, psutil.Process]] = []

        def in_the_middle() -> bool:
            busy[:] = [each for each in servers(platform, job_id) if in_mid_episode(each[1])]
            return bool(busy) or client.get(job_id).status.state.terminal

        until(in_the_middle, "nothing runs", PATIENCE_S)
        for worker, server in busy[:1]:
            with suppress(ProcessLookupError):  # it was over before
                os.kill(server.pid if victim == "server" else worker, signal.SIGKILL)
        status = client.wait(job_id, timeout_s=PATIENCE_S).status
        assert status.state == "succeeded", f"{status.reason}\n{platform.logs()}"
        report = client.verify(job_id)
        assert report.ok, report.problems
    until(lambda: not any(server.is_running() for _, server in busy), "a server lives on")
    return dict(status.summary)
