"""Chat templates are tried, before a job is accepted, with the replies of its environment."""

from __future__ import annotations

import json
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

NEEDS_SEAL = pytest.mark.skipif(landlock.abi() < 6, reason="needs Landlock with scopes")
WORDS = {
    "version": "1.0",
    "model": {"type": "WordLevel", "vocab": {"eee": 0, "</s>": 1}, "unk_token": "eee"},
}
CHAT = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
)
LAST = "{{ tools | tojson }}{{ messages[-1].content }}"
SILENT = CHAT.replace("if tools", "if 0")
USERS = CHAT.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")


@pytest.fixture(params=[pytest.param("process", marks=NEEDS_SEAL), "in_process"])
def settings_changes(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"tokenizers": {"run_in": request.param}}


@pytest.mark.parametrize(
    ("environment", "template", "why"),
    [
        ("arithmetic", LAST, ""),  # its episodes have one turn
        ("guess_number", CHAT, ""),
        ("mixed", LAST, "model.path: the chat template drops earlier turns"),
        ("guess_number", LAST, "model.path: the chat template drops earlier turns"),
        ("tools", CHAT, ""),
        ("tools", SILENT, "model.path: the chat template ignores `tools`"),
        ("tools", USERS, "model.path: the chat template does not show a message with the role"),
    ],
)
async def test_a_template_is_tried_with_the_replies_of_the_environment(
    gateway: Gateway, job: dict[str, Any], environment: str, template: str, why: str
) -> None:
    job["tasks"] = {"environment": environment}
    if environment == "mixed":
        sources = [{"environment": "arithmetic"}, {"environment": "guess_number"}]
        job["tasks"] = {"environment": "dataset", "options": {"sources": sources}}
    if environment != "arithmetic":
        job["reward"] = ["environment"]
    config = {"eos_token": "</s>", "chat_template": template}
    files = {"config.json": {}, "tokenizer.json": WORDS, "tokenizer_config.json": config}
    asked = pb.SubmitJobRequest(
        spec_json=json.dumps(job),
        files={name: json.dumps(data).encode() for name, data in files.items()},
    )
    if not why:
        await call(gateway.stub.SubmitJob, asked, timeout_s=PATIENCE_S)
        return
    with pytest.raises(ConfigError, match=f"^{why}"):
        await call(gateway.stub.SubmitJob, asked, timeout_s=PATIENCE_S)


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": [{"name": "x"}]},
        {"chat_template": "{{ 'a' * 10 ** 11 }}"},
        {"chat_template": 7},
        [],
    ],
)
async def test_files_of_another_form_are_refused_by_name(
    gateway: Gateway, job: dict[str, Any], config: Any
) -> None:
    """Nor is the gateway itself at fault, in whose process they may be read."""
    files = {"config.json": {}, "tokenizer.json": WORDS, "tokenizer_config.json": config}
    asked = pb.SubmitJobRequest(
        spec_json=json.dumps({**job, "tasks": {"environment": "guess_number"}}),
        files={name: json.dumps(data).encode() for name, data in files.items()},
    )
    with pytest.raises(ConfigError, match=r"^model\.path: "):
        await call(gateway.stub.SubmitJob, asked, timeout_s=PATIENCE_S)
