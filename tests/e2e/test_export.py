"""A model of the hub is trained, evaluated and exported; what was exported answers the same."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.enums import JobState, TokenSource
from paceline.front.client import Client
from paceline.front.local.supervisor import Local
from paceline.types import Transcript
from paceline_harness.models.hub import FakeHub, serving_hub
from paceline_harness.patience import PATIENCE_S
from paceline_rollout.engines.sglang.server import Launch, LaunchedServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

PROMPTS, STEPS = 100, 4
MIN_AGREEMENT = 0.99
NEAR_TIE = 1e-3  # nat
TOKEN = "hf_secret_of_this_test"
JOB: dict[str, Any] = {
    "name": "export",
    "model": {"path": "org/arithmetic", "dtype": "float32"},
    "tasks": {"environment": "arithmetic", "options": {"digits": 2, "operations": ["+"]}},
    "eval": {"every": 2, "tasks": PROMPTS, "options": {"split": "heldout"}},
    "sampling": {"max_tokens": 4, "max_context": 16, "on_truncation": "score"},
    "reward": [{"kind": "exact"}],
    "experience": {"batch_groups": 16, "group_size": 8, "keep_trajectories": 5 * PROMPTS},
    "trainer": {
        "dtype": "float32",
        "optimizer": {"lr": 1e-4, "betas": [0.9, 0.95]},
        "checkpoint": {"every": 2, "keep": 1},
    },
    "stop": {"steps": STEPS},
}


@dataclass(frozen=True)
class Answer:
    """What an evaluation said to a prompt, greedily."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with serving_hub() as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield found


def answers(client: Client, job_id: str, version: int) -> dict[str, Answer]:
    """The answers of the evaluation of a version, by task."""
    found: dict[str, Answer] = {}
    token = ""
    while True:
        page = client.list_trajectories(job_id, purpose="eval", page_size=200, page_token=token)
        for each in page.trajectories:
            [transcript] = each.transcripts
            if {run.version for run in transcript.versions} == {version}:
                found[each.task_id] = split(transcript)
        token = page.next_page_token
        if not token:
            return found


def split(transcript: Transcript) -> Answer:
    [said] = [span for span in transcript.spans if span.source is TokenSource.POLICY]
    return Answer(transcript.tokens[: said.start], transcript.tokens[said.start : said.end])


def export(job_id: str, run_dir: Path, output: Path, *options: str) -> Path:
    command = [sys.executable, "-m", "paceline.front.cli", "export", job_id]
    command += ["--run-dir", str(run_dir), "--output", str(output), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return output


@torch.no_grad()
def gap(model: Any, expected: Answer) -> float | None:
    """None if transformers says the same; else by how many nats it prefers another token."""
    tokens = torch.tensor([[*expected.prompt, *expected.tokens]])
    logprobs = torch.log_softmax(model(tokens).logits[0].float(), -1)
    start = len(expected.prompt)
    rows = logprobs[start - 1 : start - 1 + len(expected.tokens)]
    chosen = torch.tensor(expected.tokens)
    missing = rows.max(-1).values - rows.gather(-1, chosen[:, None])[:, 0]
    differing = (rows.argmax(-1) != chosen).nonzero()
    return float(missing[differing[0, 0]]) if len(differing) else None


def between(model: Any, one: Answer, other: Answer) -> float | None:
    """None if two answers are the same; else by how many nats the model prefers a third."""
    assert one.prompt == other.prompt
    return None if one == other else max(gap(model, each) or 0.0 for each in (one, other))


def report(what: str, gaps: Mapping[str, float | None]) -> None:
    """Print the figures, and check them."""
    differing = [value for value in gaps.values() if value is not None]
    share = 1 - len(differing) / len(gaps)
    print(f"{what}: {share:.1%} of {len(gaps)} answers agree; gaps of the others: {differing}")
    assert share >= MIN_AGREEMENT
    assert all(value < NEAR_TIE for value in differing)


def test_what_is_exported_answers_like_the_last_evaluation(
    tmp_path: Path, demo_model: Path, hub: FakeHub
) -> None:
    repo = hub.repo("org/arithmetic", token=TOKEN)
    commit = repo.push({p.name: p.read_bytes() for p in demo_model.iterdir() if p.is_file()})
    run_dir = tmp_path / "run"
    with Local(run_dir, http_port=0) as local, Client(local.url, token=local.token) as client:
        job_id = client.submit(JOB).status.job_id
        job = client.wait(job_id, timeout_s=PATIENCE_S)
        assert job.status.state is JobState.SUCCEEDED, job.status.reason
        assert job.spec["model"]["revision"] == commit
        assert [each.step for each in job.status.checkpoints][-1] == STEPS
        best = [each.step for each in job.status.checkpoints if each.best]
        assert len(best) == 1
        last = answers(client, job_id, job.status.version)
        assert len(last) == PROMPTS
        folder = export(job_id, run_dir, tmp_path / "model", "--latest", "--dtype", "float32")
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        assert next(model.parameters()).dtype == torch.float32
        report("transformers", {task: gap(model, each) for task, each in last.items()})

        again = {**JOB, "name": "again", "model": {"path": str(folder), "dtype": "float32"}}
        again["stop"] = {"steps": 1}
        second = client.submit(again).status.job_id
        assert client.wait(second, timeout_s=PATIENCE_S).status.state is JobState.SUCCEEDED
        first = answers(client, second, 0)
    assert first.keys() == last.keys()
    report("our engine", {task: between(model, first[task], last[task]) for task in last})
    check_folder(folder, commit)
    for path in run_dir.rglob("*.log"):
        assert TOKEN not in path.read_text(), path
    exported = export(job_id, run_dir, tmp_path / "best", "--best")
    assert f", step {best[0]}\n" in (exported / "README.md").read_text()


@pytest.mark.sglang
async def test_sglang_answers_like_the_last_evaluation(
    tmp_path: Path, demo_model: Path, sglang_python: str
) -> None:
    run_dir = tmp_path / "run"
    job = {**JOB, "model": {"path": str(demo_model), "dtype": "float32"}, "stop": {"steps": 2}}
    with Local(run_dir, http_port=0) as local, Client(local.url, token=local.token) as client:
        job_id = client.submit(job).status.job_id
        done = await asyncio.to_thread(client.wait, job_id, timeout_s=600)
        last = answers(client, job_id, done.status.version)
    folder = export(job_id, run_dir, tmp_path / "model", "--latest", "--dtype", "float32")
    launch = Launch(
        python=Path(sglang_python),
        model_dir=folder,
        log_path=tmp_path / "sglang.log",
        dtype="float32",
        device="cpu",
        max_context=16,
        max_concurrent=16,
        max_tokens=8192,
        threads=1,
        args=("--load-format=safetensors",),  # the last one counts
    )
    server = LaunchedServer(launch, api_key="key", timeout_s=300)
    await server.start()
    try:
        said = {task: await ask(server, each) for task, each in last.items()}
    finally:
        await server.stop()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    report("SGLang", {task: between(model, said[task], last[task]) for task in last})


async def ask(server: LaunchedServer, like: Answer) -> Answer:
    """What the server says to the same prompt, in as many tokens."""
    body = {
        "input_ids": [*like.prompt],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": len(like.tokens)},
    }
    headers = {"authorization": f"Bearer {server.api_key}"}
    async with httpx.AsyncClient(
        base_url=server.url, headers=headers, timeout=PATIENCE_S
    ) as client:
        reply = (await client.post("/generate", json=body)).raise_for_status().json()
    return Answer(like.prompt, tuple(reply["output_ids"]))


def check_folder(folder: Path, commit: str) -> None:
    """What others need is there, and the card says where it is from."""
    assert AutoTokenizer.from_pretrained(folder).encode("1+2")
    assert json.loads((folder / "generation_config.json").read_text())
    card = (folder / "README.md").read_text()
    assert f"`org/arithmetic` at `{commit}`" in card
    assert f"| eval | {STEPS} |" in card
    assert "base_model: org/arithmetic" in card
    assert (folder / "rewards.svg").read_text().startswith("<svg")
