"""A job with tools, through all services: what tools answer is in the transcripts, marked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.enums import JobState, TokenSource
from paceline.environments.tools.corpus import fact
from paceline.tokens.chat import Tokenizer
from paceline.types import Trajectory
from paceline_harness.patience import PATIENCE_S


def call(name: str, /, **arguments: str) -> str:
    """A call as the template of the example shows it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
STEPS = 4
# What a trained model says: calls that are right or wrong, and answers.
REPLIES = [
    *(call("search", query=" ".join((fact(n).kind, fact(n).name))) for n in range(3)),
    call("calculator", expression="17 + 25"),
    call("calculator", expression="("),
    call("read_note", name="none"),
    "<tool_call>\nno JSON\n</tool_call>",
    "42",
]


@pytest.fixture
def job(tools_model: Path) -> dict[str, Any]:
    """The example, shortened."""
    job = yaml.safe_load((ROOT / "examples" / "tools.yaml").read_text())
    engine = {"kind": "simulated", "replies": REPLIES, "decode_tokens_per_s": 10_000.0}
    changes = {"rollout": {"engine": engine}, "eval": None, "stop": {"steps": STEPS}}
    job["experience"]["filters"] = []  # all answers of a task may be as wrong
    return job | {"model": {"path": str(tools_model)}, **changes}


def spoken(tokenizer: Tokenizer, row: Trajectory) -> list[tuple[TokenSource, str]]:
    """The parts of an episode, by source."""
    (transcript,) = row.transcripts
    return [
        (span.source, tokenizer.decode(transcript.tokens[span.start : span.end]))
        for span in transcript.spans
    ]


def test_what_tools_answer_is_shown_and_not_trained_on(
    platform: Any, job: dict[str, Any], tools_model: Path
) -> None:
    tokenizer = Tokenizer.from_files({p.name: p.read_bytes() for p in tools_model.iterdir()})
    with platform.client() as client:
        ended = client.wait(client.submit(job).status.job_id, timeout_s=PATIENCE_S).status
        assert ended.state is JobState.SUCCEEDED, ended.reason
        rows = client.list_trajectories(ended.job_id, page_size=200).trajectories
        assert client.verify(ended.job_id).ok
    episodes = [spoken(tokenizer, row) for row in rows]
    called = [parts for parts in episodes if any("<tool_call>" in said for _, said in parts)]
    assert called
    assert {TokenSource.TOOL} <= {source for parts in called for source, _ in parts}
    for row, parts in zip(rows, episodes, strict=True):
        policy = [said for source, said in parts if source is TokenSource.POLICY]
        tools = [said for source, said in parts if source is TokenSource.TOOL]
        # Each turn but the last, which is the answer or one too many, had calls.
        assert all("<tool_call>" in said for said in policy[:-1])
        assert len(tools) >= len(policy) - 1
        assert len(row.transcripts[0].logprobs) == row.num_policy_tokens
        assert parts[0][0] is TokenSource.TEMPLATE
        assert "calculator(expression)" in parts[0][1]
    looked_up = [
        (said, after)
        for parts in called
        for (_, said), (source, after) in zip(parts, parts[2:], strict=False)
        if '"search"' in said and source is TokenSource.TOOL
    ]
    assert any(after.startswith("The ") and " is " in after for _, after in looked_up)
