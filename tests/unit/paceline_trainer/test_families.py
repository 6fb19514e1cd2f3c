"""Every family of models trains on its own log-probs, or is refused while it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.errors import PacelineError
from paceline.models.model_probe import problem
from paceline_harness.models.families import (
    NAMES,
    NOISY,
    REFUSED_BY_TRAINER,
    TRAINED,
    WINDOW,
    config_of,
    save_family,
    tokens_of,
)
from paceline_trainer.step.attention import TreeAttention
from paceline_trainer.step.loading import check_family, load_policy, read_config
from paceline_trainer.step.tree import prefix_tree

TOLERANCE = 2e-4


def own_logprobs(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Of the second token on, by transformers alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    return torch.log_softmax(logits.float(), -1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]


@pytest.mark.parametrize("family", TRAINED)
def test_training_mode_computes_the_log_probs_of_the_model(family: str, tmp_path: Path) -> None:
    folder = save_family(family, tmp_path)
    ids = tokens_of(family, rows=2, columns=3 * WINDOW)
    ids[1, : 2 * WINDOW] = ids[0, : 2 * WINDOW]
    expected = own_logprobs(folder, ids)
    policy = load_policy(str(folder))
    policy.train()
    num, start = ids.shape[1], 2 * WINDOW
    places = torch.arange(2 * num).view(2, num)[:, :-1].reshape(-1)
    targets = ids[:, 1:].reshape(-1)
    with torch.no_grad():
        padded = policy(ids, None, places, targets, 1.0).logprobs.view(2, -1)
        assert torch.allclose(padded, expected, atol=TOLERANCE)
        if "tree" not in policy.layouts:
            return
        tree = TreeAttention(prefix_tree(np.array([num, num]), np.array([0, start])), ids.device)
        row = torch.cat([ids[0], ids[1, start:]])
        positions = torch.cat([torch.arange(num), torch.arange(start, num)])
        second = torch.cat([torch.arange(start), torch.arange(num, num + num - start)])
        places = torch.cat([torch.arange(num)[:-1], second[:-1]])
        shared = policy(row[None], positions[None], places, targets, 1.0, tree=tree).logprobs
    assert torch.allclose(shared.view(2, -1), expected, atol=TOLERANCE)


@pytest.mark.parametrize("family", REFUSED_BY_TRAINER)
def test_a_family_that_would_train_on_others_is_refused(family: str, tmp_path: Path) -> None:
    folder = save_family(family, tmp_path)
    with pytest.raises(PacelineError, match="model"):
        load_policy(str(folder))


@pytest.mark.parametrize("family", NAMES)
def test_the_configuration_alone_tells_whether_a_family_is_trained(
    family: str, tmp_path: Path
) -> None:
    config_of(family).save_pretrained(tmp_path)
    why = problem(read_config, check_family, tmp_path)
    assert bool(why) == (family in REFUSED_BY_TRAINER), why


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "deepseek_v3", "gemma2", "gpt2"])
def test_a_model_of_published_size_is_tried_as_a_tiny_one(kind: str, tmp_path: Path) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    assert problem(read_config, check_family, tmp_path) == ""


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, "Should have a `model_type` key"),
        ({"model_type": "llama5"}, "does not recognize this architecture"),
        ({"model_type": "llama", "hidden_size": 100, "num_attention_heads": 3}, "not a multiple"),
        ({"model_type": "llama", "num_attention_heads": 16, "num_key_value_heads": 3}, "shape"),
        ({"model_type": "llama", "vocab_size": 90, "pad_token_id": 90}, "Padding_idx"),
        ({"model_type": "qwen3", "num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"model_type": "llama", "hidden_act": "swish2"}, "swish2"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "spiral"}}, "spiral"),
        (
            {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 4},
            "selected index k",
        ),
        ({"model_type": "deepseek_v3", "n_routed_experts": 30, "n_group": 8}, "shape"),
        ({"model_type": "qwen2_5_vl"}, "Unrecognized configuration class"),
    ],
)
def test_a_configuration_that_cannot_be_computed_is_refused_with_the_reason(
    config: dict[str, Any], why: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert why in problem(read_config, check_family, tmp_path)


@pytest.mark.parametrize("family", NOISY)
def test_no_family_draws_random_numbers_in_training(family: str, tmp_path: Path) -> None:
    folder = save_family(family, tmp_path, noise=0.5)
    ids = tokens_of(family, rows=1, columns=6)
    expected = own_logprobs(folder, ids)[0]
    policy = load_policy(str(folder))
    policy.train()
    for _ in range(3):
        found = policy(ids, None, torch.arange(5), ids[0, 1:], 1.0).logprobs
        assert torch.allclose(found, expected, atol=TOLERANCE)
