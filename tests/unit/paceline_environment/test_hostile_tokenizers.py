"""Jobs with hostile templates and tokenizers in the same worker as a healthy one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import pytest

from paceline.config.tokenizers import TokenizerSettings
from paceline.isolation.sandbox import landlock
from paceline.types import Assignment
from paceline.v1 import experience_pb2
from paceline_harness.peers import FakeExperience
from paceline_harness.processes import sealed_processes

if TYPE_CHECKING:
    from conftest import Staged
else:
    Staged = Any

pytestmark = pytest.mark.skipif(landlock.abi() < 6, reason="needs Landlock with scopes")

Until = Callable[[Callable[[], object]], Awaitable[None]]
SETTINGS = TokenizerSettings(timeout_s=3.0, load_s=60.0, memory_bytes=512 << 20)
TEMPLATES = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "memory": "{{ (messages | length | string) * 10 ** 10 }}",
    "refuses": "{{ raise_exception('not for you') }}",
    "floods": "{{ messages[0].content * 10 ** 7 }}",
}
REASONS = {
    "loops": "model.path: chat template: takes more than 3 s",
    "memory": "model.path: chat template: needs more than the 512 MiB",
    "refuses": "model.path: chat template: not for you",
    "floods": "limit prompt_bytes: an observation has 60000000 bytes",
    "grows": "model.path: tokenizer.json: ",
}
HEALTHY = 40


@pytest.fixture(scope="module")
def dialogues() -> dict[tuple[str, int], object]:
    """What was said in the first of two runs, for comparison with the second."""
    return {}


def hostile(name: str, healthy: dict[str, bytes]) -> dict[str, bytes]:
    files = dict(healthy)
    if name in TEMPLATES:
        files["chat_template.jinja"] = TEMPLATES[name].encode()
        return files
    document = json.loads(files["tokenizer.json"])
    grow = {"type": "Replace", "pattern": {"String": "2"}, "content": "2" * 10}
    document["normalizer"] = {"type": "Sequence", "normalizers": [grow] * 14}
    files["tokenizer.json"] = json.dumps(document).encode()
    return files


async def longest_pause_s() -> float:
    """How much this thread computed at most while nobody else had a turn, until cancelled."""
    longest = 0.0
    try:
        while True:
            since = time.thread_time()
            await asyncio.sleep(0.01)
            longest = max(longest, time.thread_time() - since)
    except asyncio.CancelledError:
        return longest


def returned(experience: FakeExperience, job_id: str) -> list[experience_pb2.EpisodeKey]:
    return [key for key in experience.given_back if key.job_id == job_id]


async def test_jobs_with_hostile_models_fail_by_name_and_delay_nobody(
    staged: Staged,
    assign: Callable[..., Assignment],
    until: Until,
    chat_files: dict[str, bytes],
) -> None:
    stage = await staged(chat=True, tokenizers=SETTINGS)
    experience = stage.experience
    for name in REASONS:
        experience.add_model(name, hostile(name, chat_files))
    await stage.open()
    experience.give([assign("warm", 4)])
    await until(lambda: len(experience.trajectories) == 4)
    pause = asyncio.create_task(longest_pause_s())
    experience.give(assign("g", 4, job_id=name) for name in REASONS)
    experience.give(assign(f"g{number}", 4) for number in range(HEALTHY))
    await until(lambda: len(experience.trajectories) == 4 * (HEALTHY + 1))
    await until(lambda: len(experience.given_back) == 4 * len(REASONS))
    pause.cancel()
    for name, reason in REASONS.items():
        details = {key.detail[: len(reason)] for key in returned(experience, name)}
        assert details == {reason}, [key.detail for key in returned(experience, name)]
    invalid = experience_pb2.GIVE_BACK_REASON_INVALID
    oversized = experience_pb2.GIVE_BACK_REASON_OVERSIZED
    assert {key.reason for key in returned(experience, "loops")} == {invalid}
    assert {key.reason for key in returned(experience, "floods")} == {oversized}
    assert not returned(experience, "job")
    assert await pause < 1.0


async def test_the_tokenizer_of_a_job_ends_with_it(
    staged: Staged,
    assign: Callable[..., Assignment],
    until: Until,
    chat_files: dict[str, bytes],
) -> None:
    stage = await staged(chat=True, tokenizers=SETTINGS.model_copy(update={"timeout_s": 60.0}))
    experience = stage.experience
    experience.add_model("loops", hostile("loops", chat_files))
    await stage.open()
    experience.give([assign("g", 4, job_id="loops"), assign("h", 4)])
    await until(lambda: len(experience.trajectories) == 4)
    await until(lambda: len(sealed_processes()) == 2)
    experience.ended_jobs.append("loops")
    await until(lambda: len(sealed_processes()) == 1)
    await until(lambda: len(returned(experience, "loops")) == 4)
    assert "the job is over" in returned(experience, "loops")[0].detail


@pytest.mark.parametrize("tokenizers", [SETTINGS, TokenizerSettings(run_in="in_process")])
async def test_a_dialogue_is_the_same_wherever_its_tokenizer_runs(
    staged: Staged,
    assign: Callable[..., Assignment],
    until: Until,
    tokenizers: TokenizerSettings,
    dialogues: dict[tuple[str, int], object],
) -> None:
    sampling = {"max_tokens": 8, "max_context": 256, "on_truncation": "score"}
    spec = {"tasks": {"environment": "talking"}, "sampling": sampling}
    stage = await staged(spec=spec, chat=True, tokenizers=tokenizers)
    await stage.open()
    stage.experience.give([assign("g", 4), assign("h", 4)])
    await until(lambda: len(stage.experience.trajectories) == 8)
    found = {
        key: (t.transcripts, t.response_text) for key, t in stage.experience.trajectories.items()
    }
    assert (
        max(len(each.transcripts[0].steps) for each in stage.experience.trajectories.values()) > 1
    )
    for key, each in found.items():
        assert dialogues.setdefault(key, each) == each
