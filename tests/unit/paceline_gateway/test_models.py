"""Models of jobs as the gateway sees them at submit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Gateway

Doc = dict[str, Any]


@pytest.fixture
def settings_changes() -> dict[str, Any]:
    return {"models": {"stores": ["file"]}}


async def refusal(gateway: Gateway, job: Doc, path: str) -> str:
    response = await gateway.post(job | {"model": {"path": path}})
    assert response.status_code == 422, response.text
    return response.json()["error"]["message"]


async def test_a_model_in_a_store_is_pinned(gateway: Gateway, job: Doc, model: Path) -> None:
    job_id = await gateway.submitted(job | {"model": {"path": f"file://{model}"}})
    spec = (await gateway.http.get(f"/v1/jobs/{job_id}")).json()["spec"]
    assert spec["model"]["path"] == f"file://{model}"
    assert len(spec["model"]["digest"]) == 64
    assert set(gateway.jobs.files[job_id]) == {"config.json", "tokenizer.json"}
    (model / "tokenizer.json").unlink()
    assert await refusal(gateway, job, f"file://{model}") == (
        f"model.path: file://{model} has no tokenizer.json"
    )
    assert "takes models from: file://" in await refusal(gateway, job, "s3://bucket/model")


async def test_only_intact_safetensors_are_accepted(
    gateway: Gateway, job: Doc, model: Path
) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(b"0" * 100)
    assert "is no safetensors file, or is cut" in await refusal(gateway, job, str(model))
    weights.rename(model / "pytorch_model.bin")
    assert "only as pytorch_model.bin, a pickle" in await refusal(gateway, job, str(model))
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "does not have model-00001-of-00002.safetensors" in await refusal(
        gateway, job, str(model)
    )
    (model / "model.safetensors.index.json").write_text("[]")
    assert "index.json is damaged" in await refusal(gateway, job, f"file://{model}")


async def test_the_tokenizer_of_another_model_is_refused(
    gateway: Gateway, job: Doc, model: Path
) -> None:
    (model / "config.json").write_text('{"vocab_size": 3}')
    tokenizer: dict[str, Any] = {
        "model": {"vocab": {"a": 0, "b": 2, "<image>": 3}},
        "added_tokens": [{"id": 3, "content": "<image>"}],
    }
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    await gateway.submitted(job)
    tokenizer["model"]["vocab"]["c"] = 7
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    told = await refusal(gateway, job, str(model))
    assert "has ids up to 7, but config.json says vocab_size 3" in told
    tokenizer["added_tokens"] += [{"id": []}, {}, None]  # of no use, and no reason to break
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "has ids up to 7" in await refusal(gateway, job, str(model))
    (model / "config.json").write_text('{"text_config": {"vocab_size": 8}}')
    await gateway.submitted(job)
