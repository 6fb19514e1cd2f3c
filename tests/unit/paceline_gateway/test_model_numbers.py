"""Every number of config.json against every field of a job that it bounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from paceline.config import parse_job
from paceline.errors import ConfigError
from paceline.models.families import POSITIONS
from paceline_gateway.submit.model_limits import check_model_limits

Doc = dict[str, Any]
JOB: Doc = {
    "name": "job",
    "model": {"path": "m"},
    "tasks": {"environment": "arithmetic"},
    "reward": ["exact"],
}
ENGINES = ["torch", "simulated", "sglang", "pkg.mod:engine"]


def limits(config: Doc, *, max_context: int = 2048, engine: str | Doc = "torch") -> None:
    job = {
        **JOB,
        "sampling": {"max_tokens": 8, "max_context": max_context},
        "rollout": {"engine": engine},
    }
    check_model_limits(parse_job(job), {"config.json": json.dumps(config).encode()})


def nested(text: Doc) -> Doc:
    return {"text_config": text}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("key", POSITIONS)
@pytest.mark.parametrize("nest", [dict, nested])
def test_no_engine_gets_more_positions_than_the_model_has(
    engine: str, key: str, nest: Callable[[Doc], Doc]
) -> None:
    """The trainer computes them too."""
    told = r"sampling.max_context: 1048576; the model has 64 positions"
    with pytest.raises(ConfigError, match=told):
        limits(nest({key: 64}), max_context=1 << 20, engine=engine)
    limits(nest({key: 64}), max_context=64, engine=engine)


@pytest.mark.parametrize(
    ("rope", "most"),
    [
        ({"type": "linear", "factor": 4.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8}, 64),
        ({"rope_type": "default"}, 64),
        ({"full_attention": {"rope_type": "linear", "factor": 2.0}}, 128),
    ],
)
def test_a_scaled_rope_has_the_positions_that_it_was_scaled_to(rope: Doc, most: int) -> None:
    config = {"max_position_embeddings": 64, "rope_parameters": rope}
    limits(config, max_context=most, engine="sglang")
    with pytest.raises(ConfigError, match=f"the model has {most} positions"):
        limits(config, max_context=most + 1, engine="sglang")


@pytest.mark.parametrize("value", ["64", 64.0, 0, -1, True, [64], {}])
@pytest.mark.parametrize("key", ["vocab_size", "num_hidden_layers", *POSITIONS])
def test_limits_that_are_no_numbers_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: {key} is .* allowed: a whole number"):
        limits({key: value})


def test_each_layer_has_a_kind() -> None:
    kinds = ["full_attention"] * 3
    limits({"layer_types": kinds, "num_hidden_layers": 3})
    with pytest.raises(ConfigError, match="layer_types has 3 entries, and num_hidden_layers is 4"):
        limits({"layer_types": kinds, "num_hidden_layers": 4})


def test_heads_are_shared_out_evenly() -> None:
    limits({"num_attention_heads": 12}, engine={"kind": "sglang", "tp": 4})
    told = r"rollout.engine.tp: 8; the model has 12 attention heads .* a divisor of 12"
    with pytest.raises(ConfigError, match=told):
        limits({"num_attention_heads": 12}, engine={"kind": "sglang", "tp": 8})
