"""Built-in rewards through all services: parts that build on each other, and a model as judge."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.enums import Purpose, ScoreStatus
from paceline_harness.patience import PATIENCE_S
from paceline_harness.servers.chat import JudgeServer, Reply, chat, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
KEY = "sk-of-the-operator"
REWARD = [
    {"kind": "math", "find": "expression"},
    {"kind": "format", "pattern": r"\s*(?P<answer>\d+)\s*", "weight": 0.25},
    {"kind": "length", "shape": "linear", "after": ["math"], "weight": 0.5},
    {"kind": "judge", "model": "m", "prompt": "Is it good? {response}", "timeout_s": 60.0},
]
LOSS = """
from pydantic import Field
from paceline.methods.parts.batch import TokenBatch, TokenLoss
from paceline.plugins import StrictModel

class CapOptions(StrictModel):
    cap: float = Field(default=2.0, gt=0)

def capped(tokens: TokenBatch, options: CapOptions) -> TokenLoss:
    weights = (tokens.logprobs.detach() - tokens.behaviour).exp().clamp(max=options.cap)
    loss = -tokens.advantages * weights * tokens.logprobs
    return TokenLoss(loss, sums={"importance": weights.sum()})
"""
ADVANTAGE = """
from paceline.plugins import Advantages, Variant

def same(observation, context, *, name):
    return Variant(messages=observation.messages, text=observation.text, name=name)

def mean(batch, context):
    values = batch.rewards - batch.rewards.mean()
    return Advantages(values, notes={"own_spread": float(values.std())})
"""


@pytest.fixture(scope="module")
def judge() -> Iterator[JudgeServer]:
    """Likes an even length; each third request fails."""
    requests = count()

    def answer(body: dict[str, Any]) -> Reply:
        if next(requests) % 3 == 0:
            return 503, b"overloaded"
        return chat(f"Score: {10 * (len(body['messages'][0]['content']) % 2)}")

    with serving(answer) as server:
        yield server


@pytest.fixture(scope="module")
def platform(
    judge: JudgeServer,
    tmp_path_factory: pytest.TempPathFactory,
    start_platform: Callable[..., Any],
) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("judged")
    (folder / "key").write_text(KEY)
    settings = {"base_url": judge.url, "key_file": str(folder / "key")}
    (folder / "endpoints.yaml").write_text(yaml.safe_dump({"endpoints": {"judge": settings}}))
    for name, text in (("losses/own_losses.py", LOSS), ("task/control.py", ADVANTAGE)):
        (folder / name).parent.mkdir()
        (folder / name).write_text(text)
    words = ("--endpoints", str(folder / "endpoints.yaml"), "--trust", str(folder / "losses"))
    made = start_platform(folder / "run", *words)
    yield made
    made.stop()


def test_two_steps_with_four_rewards(
    platform: Any, judge: JudgeServer, tiny_job: Callable[..., dict[str, Any]]
) -> None:
    """With an advantage and a transform of the job's code, and a trusted loss."""
    experience = {"batch_groups": 4, "group_size": 4, "max_staleness": 0, "filters": []}
    job = tiny_job(
        stop={"steps": 2},
        reward=REWARD,
        code={"path": str(Path(platform.run_dir).parent / "task")},
        tasks={
            "environment": "arithmetic",
            "options": {"digits": 1},
            "transform": {"kind": "control:same", "name": "own"},
        },
        experience={**experience, "advantage": "control:mean"},
        trainer={"objective": {"surrogate": "own_losses:capped", "corrections": []}},
        eval={"every": 2, "tasks": 8, "samples": 4, "temperature": 1.0, "majority_at": [4]},
    )
    with platform.client() as client:
        job_id = client.submit(job).status.job_id
        status = client.wait(job_id, timeout_s=PATIENCE_S).status
        assert status.state == "succeeded", f"{status.reason}\n{platform.logs()}"
        found = client.list_trajectories(job_id, page_size=200, purpose=Purpose.TRAIN).trajectories
        rows = client.list_metrics(job_id).rows
        spec = str(client.get(job_id).spec)
    assert len(found) == 32
    for each in found:
        parts = each.score.parts
        assert each.provenance.prompt_variant == "own"
        said, likes = each.response_text.strip(), len(f"Is it good? {each.response_text}") % 2
        assert parts["format"] == float(said.isdigit())
        if said.isdigit():
            assert each.score.normalised_answer == str(int(said))
        assert parts["judge"] == float(likes)
        assert parts["length"] <= 0.5 * parts["math"] or parts["length"] <= 0.0
        whole = parts["math"] + 0.25 * parts["format"] + 0.5 * parts["length"] + parts["judge"]
        assert each.score.reward == pytest.approx(whole)
    statuses = Counter(each.score.status for each in found)
    steps = [row.values for row in rows if row.kind is Purpose.TRAIN]
    share = sum(each["parse_error_share"] for each in steps) / len(steps)
    assert share == pytest.approx(statuses[ScoreStatus.PARSE_ERROR] / len(found))
    assert all(each["timeout_share"] == 0.0 for each in steps)
    assert all(any("importance" in name for name in each) for each in steps), steps
    assert all("own_spread" in each for each in steps), steps
    evals = [row.values for row in rows if row.kind is Purpose.EVAL]
    assert all(0.0 <= each["maj@4"] <= 1.0 and "parse_error_share" in each for each in evals)
    assert set(judge.keys) == {f"Bearer {KEY}"}
    assert KEY not in spec
    for path in Path(platform.run_dir).rglob("*"):
        if path.is_file() and os.access(path, os.R_OK):
            assert KEY.encode() not in path.read_bytes(), path
