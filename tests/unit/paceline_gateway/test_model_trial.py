"""Tokenizers and chat templates are tried, in a sealed process, before a job is accepted."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from paceline.errors import ConfigError
from paceline.isolation.sandbox import landlock
from paceline.v1 import jobs_pb2 as pb
from paceline_harness.patience import PATIENCE_S, call

if TYPE_CHECKING:
    from conftest import Gateway
else:
    Gateway = Any

pytestmark = pytest.mark.skipif(landlock.abi() < 6, reason="needs Landlock with scopes")

VOCABULARY = {"eee": 0, "</s>": 1}
WORDS = {"version": "1.0", "model": {"type": "WordLevel", "vocab": VOCABULARY, "unk_token": "eee"}}
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GROWS = {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 10}
CASES = [
    ({}, LOOPS, "model.path: chat template: takes more than 1 s"),
    ({}, "{{ 7 ** (10 ** 9) }}", "model.path: chat template: reading it takes more than 3 s"),
    ({}, "{% for %}", "model.path: the chat template cannot be read"),
    (
        {"normalizer": {"type": "Sequence", "normalizers": [GROWS] * 12}},
        "{{ messages[0].content }}",
        "model.path: tokenizer.json: ",
    ),
    (
        {"decoder": {"type": "Sequence", "decoders": [GROWS] * 12}},
        "hello {{ messages[0].content }}",
        "model.path: tokenizer.json: ",
    ),
    ({"model": {"type": "none"}}, "", "model.path: tokenizer.json cannot be read"),
    (
        {},
        "{% set a = messages[0].content * (10 ** 9) %}{{ a }}",
        "model.path: chat template: needs more than the 512 MiB of memory",
    ),
    (
        {},
        "{{ messages[0].content.rjust(10 ** 10) }}",
        "model.path: chat template: needs more than the 512 MiB of memory",
    ),
    (
        {},
        "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(messages | length) }}",
        "model.path: chat template: maximum recursion depth",
    ),
    ({}, "{{ messages[0].content * (10 ** 7) }}", "model.path: "),
]


@pytest.fixture
def settings_changes() -> dict[str, Any]:
    limits = {"timeout_s": 1.0, "load_s": 3.0, "memory_bytes": 512 << 20}
    return {"tokenizers": {"run_in": "process", **limits}}


def request(job: dict[str, Any], changes: dict[str, Any], template: str) -> pb.SubmitJobRequest:
    config = {"eos_token": "</s>", "chat_template": template}
    files = {"config.json": {}, "tokenizer.json": WORDS | changes, "tokenizer_config.json": config}
    return pb.SubmitJobRequest(
        spec_json=json.dumps(job),
        files={name: json.dumps(data).encode() for name, data in files.items()},
    )


@pytest.mark.parametrize(("changes", "template", "why"), CASES)
async def test_what_cannot_be_read_or_takes_too_much_is_refused_by_name(
    gateway: Gateway, job: dict[str, Any], changes: dict[str, Any], template: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{why}"):
        await call(gateway.stub.SubmitJob, request(job, changes, template), timeout_s=PATIENCE_S)


REFUSES = "{{ raise_exception('no dialogue at all') }}"
WITH_SYSTEM = "{{ messages[0].content.strip() + messages[1].content.strip() }}"
USELESS = {
    "rejects every dialogue": (REFUSES, "no dialogue at all"),
    "another field": ("{% for m in messages %}{{ m.value }}{% endfor %}", "ignores the content"),
    "only parts": ("{{ messages[0].content[0].text }}", "ignores the content of message 0"),
    "no system": ("{{ messages[1].content.strip() }}", "has no element 1"),
    "nothing": ("hello", "ignores the content of message 0, of the role 'user'"),
}


@pytest.mark.parametrize("title", USELESS)
async def test_a_template_that_shows_no_first_message_is_refused(
    gateway: Gateway, job: dict[str, Any], title: str
) -> None:
    template, why = USELESS[title]
    with pytest.raises(ConfigError, match=rf"^model\.path: chat template: .*{why}"):
        await call(gateway.stub.SubmitJob, request(job, {}, template), timeout_s=PATIENCE_S)


@pytest.mark.parametrize("template", ["", WITH_SYSTEM])
async def test_others_are_accepted_and_tried_once(
    gateway: Gateway, job: dict[str, Any], template: str
) -> None:
    seconds = list[float]()
    for _ in range(6):
        since = time.monotonic()
        asked = request(job, {}, template)
        await call(gateway.stub.SubmitJob, asked, timeout_s=PATIENCE_S)
        seconds.append(time.monotonic() - since)
    assert min(seconds[1:]) < seconds[0]


async def test_a_token_that_the_template_shows_has_an_embedding(
    gateway: Gateway, job: dict[str, Any]
) -> None:
    added = {"id": 2, "content": "<|user|>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    template = "<|user|>{{ messages[0].content }}"
    asked = request(job, {"added_tokens": [added | flags]}, template)
    asked.files["config.json"] = json.dumps({"vocab_size": 2}).encode()
    with pytest.raises(ConfigError, match=r"shows the token 2, but config\.json says vocab_size 2"):
        await call(gateway.stub.SubmitJob, asked, timeout_s=PATIENCE_S)
    asked.files["config.json"] = json.dumps({"vocab_size": 3}).encode()
    await call(gateway.stub.SubmitJob, asked, timeout_s=PATIENCE_S)
