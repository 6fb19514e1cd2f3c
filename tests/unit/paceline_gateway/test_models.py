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


@pytest.mark.parametrize(
    ("config", "generation", "told"),
    [
        ({}, {"eos_token_id": "2"}, "generation_config.json: eos_token_id is '2' (str); an id or"),
        ({}, {"eos_token_id": 2.0}, "eos_token_id is '2.0' (float); an id or a list of ids"),
        ({}, {"eos_token_id": [None, 2]}, "eos_token_id is '[None, 2]' (list); an id or a list"),
        ({}, {"eos_token_id": True}, "eos_token_id is 'True' (bool); an id or a list of ids"),
        ({}, {"eos_token_id": [2, 8]}, "8 is not in the vocabulary; allowed: 0 to 7"),
        ({}, {"eos_token_id": -1}, "-1 is not in the vocabulary; allowed: 0 to 7"),
        ({"eos_token_id": "2"}, {}, " config.json: eos_token_id is '2' (str)"),
        ({"eos_token_id": [*range(8)] * 9}, {}, "at most 64 ids are allowed"),
        (
            {"max_position_embeddings": 16},
            {},
            "sampling.max_context: 2048; the model has 16 positions",
        ),
        ({"n_positions": 1024}, {}, "sampling.max_context: 2048; the model has 1024 positions"),
        (
            {"text_config": {"max_position_embeddings": 16}},
            {},
            "sampling.max_context: 2048; the model has 16 positions",
        ),
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            {},
            "config.json: layer_types has 'linear_attention', which the engine 'torch' lacks",
        ),
        ({"model_type": "mamba"}, {}, "'mamba': the engine 'torch' cannot compute the log-probs"),
        ({"model_type": "bloom"}, {}, "model_type 'bloom': the trainer cannot compute the log-pr"),
        (
            {"text_config": {"model_type": "qwen3_5_text"}},
            {},
            "model_type 'qwen3_5_text': the engine 'torch' cannot compute",
        ),
        (
            {
                "max_position_embeddings": 8192,
                "rope_scaling": {"type": "dynamic", "factor": 2.0},
                "original_max_position_embeddings": 1024,
            },
            {},
            "sampling.max_context: 2048; the model has 1024 positions",
        ),
        ({"use_bidirectional_attention": True}, {}, "use_bidirectional_attention is true, and"),
        ([], {}, "config.json is no object"),
        ({}, [], "generation_config.json is no object"),
    ],
)
async def test_what_a_model_says_of_itself_is_compared_with_the_job(
    gateway: Gateway, job: Doc, model: Path, config: Any, generation: Any, told: str
) -> None:
    base = {"vocab_size": 8} if isinstance(config, dict) else None
    (model / "config.json").write_text(json.dumps(base | config if base else config))
    (model / "generation_config.json").write_text(json.dumps(generation))
    assert told in await refusal(gateway, job, str(model))


async def test_what_fits_the_job_is_accepted(gateway: Gateway, job: Doc, model: Path) -> None:
    config = {
        "vocab_size": 8,
        "eos_token_id": "of no use where there is a generation_config.json",
        "max_position_embeddings": 2048,
        "layer_types": ["full_attention", "sliding_attention"],
        "model_type": "llama",
    }
    (model / "config.json").write_text(json.dumps(config))
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    await gateway.submitted(job)


async def test_the_torch_engine_only_is_limited_by_layers(
    gateway: Gateway, job: Doc, model: Path
) -> None:
    (model / "config.json").write_text('{"model_type": "mamba"}')
    await gateway.submitted({**job, "rollout": {"engine": "simulated"}})


async def test_more_stop_strings_than_engines_take_are_refused(
    gateway: Gateway, job: Doc, model: Path
) -> None:
    stops = [f"{n}." for n in range(17)]
    for stop, told in ((stops, "sampling.stop"), ([""], "sampling.stop.0")):
        wrong = {**job, "sampling": {"stop": stop}}
        assert told in await refusal(gateway, wrong, str(model))
    await gateway.submitted({**job, "sampling": {"stop": stops[:16]}})


EXPERTS = [{"num_experts": 4}, {"num_local_experts": 8}, {"text_config": {"n_routed_experts": 2}}]


@pytest.mark.parametrize("config", EXPERTS)
@pytest.mark.parametrize("target", ["all-linear", "gate_proj", "mlp.experts.down_proj", "w1"])
async def test_adapters_of_experts_are_refused(
    gateway: Gateway, job: Doc, model: Path, config: Doc, target: str
) -> None:
    (model / "config.json").write_text(json.dumps(config))
    targets = [target] if target == "all-linear" else ["q_proj", target]
    wrong = {**job, "trainer": {"lora": {"target_modules": targets}}}
    expected = f"trainer.lora.target_modules: {target}: experts cannot have adapters"
    message = await refusal(gateway, wrong, str(model))
    assert expected in message.replace("'", "")
    assert "allowed are linear layers beside them, such as q_proj" in message


@pytest.mark.parametrize(
    ("config", "targets"),
    [
        ({"num_experts": 4}, ["q_proj", "v_proj"]),
        ({"num_experts": 4}, ["shared_expert.gate_proj"]),
        ({"num_experts": 4, "shared_expert_intermediate_size": 8}, ["gate_proj", "up_proj"]),
        ({"n_routed_experts": 4, "first_k_dense_replace": 1}, ["down_proj"]),
        ({"num_experts": 1}, ["all-linear"]),
        ({"num_experts": "four"}, ["all-linear"]),
        ({}, ["gate_proj", "up_proj"]),
    ],
)
async def test_adapters_of_layers_are_accepted(
    gateway: Gateway, job: Doc, model: Path, config: Doc, targets: list[str]
) -> None:
    (model / "config.json").write_text(json.dumps(config))
    lora = {"target_modules": targets}
    await gateway.submitted({**job, "model": {"path": str(model)}, "trainer": {"lora": lora}})
