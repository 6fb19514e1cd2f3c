"""The tensors of a model folder are compared with its config.json, without torch."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.models.parse_child import TENSORS
from paceline.models.parsing import parse
from paceline.models.weights import check_headers
from paceline.weights.names import CheckpointNames
from paceline_harness.models.families import NAMES, config_of

Doc = dict[str, Any]
LLAMA: Doc = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "tie_word_embeddings": False,
}
ROWS: dict[str, Doc] = json.loads(TENSORS.read_bytes())
OF_A_LAYER: list[str] = ROWS["llama"]["layer"][0]


def llama() -> dict[str, tuple[str, list[int]]]:
    """Type and shape of each tensor."""
    tensors = {
        f"model.layers.{at}.{name}": ("BF16", [16, 16]) for at in range(4) for name in OF_A_LAYER
    }
    ends = {"model.embed_tokens.weight": ("BF16", [100, 16]), "lm_head.weight": ("BF16", [100, 16])}
    return tensors | ends | {"model.norm.weight": ("BF16", [16])}


def header(tensors: dict[str, tuple[str, list[int]]]) -> bytes:
    listed = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 8]}
        for name, (dtype, shape) in tensors.items()
    }
    return json.dumps(listed | {"__metadata__": {"format": "pt"}}).encode()


def problems(tensors: dict[str, tuple[str, list[int]]], **changes: Any) -> list[str]:
    """Of one file with these tensors, and of an index that names them; the same, but for shapes."""
    config = json.dumps(LLAMA | changes).encode()
    _, found = parse("headers", [config, b"{}", header(tensors)])
    listed = json.dumps({"weight_map": dict.fromkeys(tensors, "a.safetensors")}).encode()
    _, by_name = parse("names", [listed, config])
    assert [each for each in found if "shape" not in each and "floats" not in each] == by_name
    return found


def without(*names: str) -> Callable[[Doc], None]:
    def change(tensors: Doc) -> None:
        for name in names:
            del tensors[name]

    return change


def put(name: str, dtype: str = "BF16", *shape: int) -> Callable[[Doc], None]:
    return lambda tensors: tensors.update({name: (dtype, list(shape))})


def no_layer(*numbers: int) -> Callable[[Doc], None]:
    return without(*(f"model.layers.{at}.{name}" for at in numbers for name in OF_A_LAYER))


FAULTS: dict[str, tuple[Callable[[Doc], None], str]] = {
    "a layer": (no_layer(2), "the files lack layer 2, and config.json says num_hidden_layers 4"),
    "layers": (no_layer(1, 3), "the files lack layer 1 and 1 more, and config.json says"),
    "all layers": (no_layer(0, 1, 2, 3), "the files have no layers, but config.json says"),
    "a layer too many": (
        put("model.layers.4.mlp.up_proj.weight", "BF16", 16, 16),
        "the files have layer 4 (mlp.up_proj.weight), but config.json says",
    ),
    "a tensor of a layer": (
        without("model.layers.2.mlp.up_proj.weight"),
        "the files lack mlp.up_proj.weight of layer 2, which every llama model has",
    ),
    "a tensor of the first layer": (
        without("model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.o_proj.weight"),
        "the files lack mlp.up_proj.weight of layer 0 and 1 more, which every llama model has",
    ),
    "a tensor of all layers": (
        without(*(f"model.layers.{at}.self_attn.k_proj.weight" for at in range(4))),
        "the files lack self_attn.k_proj.weight of layer 0 and 3 more, which every llama model",
    ),
    "a bias of one layer": (
        put("model.layers.2.mlp.up_proj.bias", "BF16", 16),
        "layer 0 lacks mlp.up_proj.bias, which layer 2 has",
    ),
    "the last norm": (without("model.norm.weight"), "the files lack norm.weight, which every"),
    "the embedding": (without("model.embed_tokens.weight"), "the files have no embedding"),
    "the head": (without("lm_head.weight"), "the files have no lm_head.weight, and by config.json"),
    "fewer words": (
        put("model.embed_tokens.weight", "BF16", 99, 16),
        "model.embed_tokens.weight has the shape [99, 16], but config.json says vocab_size 100",
    ),
    "more words": (
        put("lm_head.weight", "BF16", 101, 16),
        "lm_head.weight has the shape [101, 16], but config.json says vocab_size 100",
    ),
    "another width": (
        put("model.embed_tokens.weight", "BF16", 100, 8),
        "model.embed_tokens.weight has the shape [100, 8], but config.json says hidden_size 16",
    ),
    "no matrix": (
        put("model.embed_tokens.weight", "BF16"),
        "model.embed_tokens.weight has the shape [], but config.json says vocab_size 100",
    ),
    "integers": (
        put("model.layers.1.mlp.up_proj.weight", "I8", 16, 16),
        "model.layers.1.mlp.up_proj.weight is I8, which is no type of floats",
    ),
    "small floats": (
        put("model.layers.1.mlp.up_proj.weight", "F8_E4M3", 16, 16),
        "model.layers.1.mlp.up_proj.weight is F8_E4M3, which is no type of floats",
    ),
    "a scale of small floats": (
        put("model.layers.1.mlp.up_proj.weight_scale_inv", "F32", 1, 1),
        "model.layers.1.mlp.up_proj.weight_scale_inv is neither weight nor bias of a layer",
    ),
    "an adapter": (
        put("model.layers.0.self_attn.q_proj.lora_A.weight", "BF16", 2, 16),
        "model.layers.0.self_attn.q_proj.lora_A.weight is neither weight nor bias of a layer",
    ),
    "a wrapper": (
        put("_orig_mod.model.norm.weight", "BF16", 16),
        "_orig_mod.model.norm.weight has the name of a wrapper (_orig_mod); save the model",
    ),
    "packed integers": (
        put("model.layers.1.mlp.up_proj.qweight", "I32", 2, 16),
        "model.layers.1.mlp.up_proj.qweight is I32, which is no type of floats",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_named(fault: str) -> None:
    change, told = FAULTS[fault]
    tensors = llama()
    assert problems(tensors) == []
    change(tensors)
    assert any(each.startswith(told) for each in problems(tensors)), problems(tensors)


def test_the_head_may_be_missing_only_where_it_is_the_embedding() -> None:
    tensors = llama()
    del tensors["lm_head.weight"]
    assert problems(tensors, tie_word_embeddings=True) == []
    assert "the files have no lm_head" in problems(tensors, tie_word_embeddings=None)[0]
    assert not ROWS["llama"]["tied"]
    assert ROWS["gemma"]["tied"]


def test_what_is_no_fault_is_accepted() -> None:
    some = llama() | {
        "model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", [8]),  # of old releases
        "model.vision_tower.layers.9.fc.weight": ("BF16", [3, 3]),
        "model.vision_tower.embed_tokens.weight": ("BF16", [3, 3]),
        "model.position_ids": ("I64", [1, 64]),
    }
    assert problems(some) == []
    further = some | {"model.layers.4.eh_proj.weight": ("BF16", [3, 3])}
    assert problems(further, num_nextn_predict_layers=1) == []
    # A family that nothing is known of.
    uneven = {name: each for name, each in some.items() if "layers.0.mlp" not in name}
    assert problems(uneven, model_type="new", layer_types=["x", "y", "y", "y"]) == []


MOE: Doc = {"model_type": "qwen3_moe", "num_experts": 4}


def moe(num: int = 4, *, form: int = 0) -> dict[str, tuple[str, list[int]]]:
    """Of a model of two layers with `num` experts; `form` 1: all of a layer in one tensor."""
    names = [
        name.replace("*", str(at)) for name in ROWS["qwen3_moe"]["layer"][form] for at in range(num)
    ]
    tensors = {f"model.layers.{at}.{name}": ("BF16", [16, 16]) for at in range(2) for name in names}
    return tensors | {name: each for name, each in llama().items() if ".layers." not in name}


@pytest.mark.parametrize(
    ("tensors", "more", "told"),
    [
        (moe(), {}, ""),
        (moe(form=1), {}, ""),
        (moe(3), {}, "the files lack mlp.experts.3.down_proj.weight of layer 0 and 5 more, which"),
        (moe(), {"num_experts": 8}, "mlp.experts.4.down_proj.weight of layer 0 and 23 more"),
        (
            {name: each for name, each in moe().items() if ".experts." not in name},
            {},
            "the files lack mlp.experts.0.down_proj.weight of layer 0 and 23 more, which every",
        ),
        (
            {name: each for name, each in moe().items() if not name.endswith("mlp.gate.weight")},
            {},
            "the files lack mlp.gate.weight of layer 0 and 1 more, which every qwen3_moe model has",
        ),
        (llama(), {"mlp_only_layers": [0, 1, 2, 3]}, "self_attn.k_norm.weight of layer 0 and 7"),
        (llama(), {}, "the files lack mlp.experts.0.down_proj.weight of layer 0 and"),
    ],
)
def test_experts_that_are_in_no_layer_are_missed(
    tensors: dict[str, tuple[str, list[int]]], more: Doc, told: str
) -> None:
    layers = {name.split(".")[2] for name in tensors if ".layers." in name}
    found = problems(tensors, **{**MOE, "num_hidden_layers": len(layers), **more})
    assert any(told in each for each in found) if told else found == [], found


@pytest.mark.parametrize(
    ("family", "change", "told"),
    [
        ("llama", {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": None}, ""),
        ("llama", {"num_attention_heads": 8}, "head_dim 8) it is [64, 32]"),
        ("llama", {"num_key_value_heads": 4}, "k_proj.weight has the shape [16, 32], but by"),
        ("llama", {"intermediate_size": 40}, "gate_proj.weight has the shape [48, 32], but by"),
        ("qwen3", {"head_dim": None}, "head_dim 128) it is [512, 32]"),
        ("gemma", {"head_dim": None}, "head_dim 256) it is [1024, 32]"),
    ],
)
def test_heads_and_widths_are_those_of_config_json(family: str, change: Doc, told: str) -> None:
    config = config_of(family)
    tensors = {n: ("BF16", list(shape)) for n, shape in CheckpointNames(config).shapes.items()}
    text = json.dumps(json.loads(config.to_json_string(use_diff=False)) | change).encode()
    _, found = parse("headers", [text, b"{}", header(tensors)])
    assert any(told in each for each in found) if told else found == [], found


@pytest.mark.parametrize("family", NAMES)
def test_the_files_of_transformers_are_accepted(family: str) -> None:
    config = config_of(family)
    shapes = CheckpointNames(config).shapes
    tensors = {name: ("BF16", list(shape)) for name, shape in shapes.items()}
    text = config.to_json_string(use_diff=False).encode()
    _, found = parse("headers", [text, b"{}", header(tensors)])
    assert found == []


def test_a_file_without_a_tensor_that_the_index_names_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    text = header({"x": ("F32", [2])})
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    index = json.dumps({"weight_map": {"x": path.name, "y": path.name}}).encode()
    with pytest.raises(ConfigError, match="the files lack y, which the index names"):
        check_headers([path], index=index)


def test_an_index_of_a_hundred_thousand_tensors_takes_two_seconds_at_most() -> None:
    """In processor time, of which the parsing process may have no more."""
    layers = [f"model.layers.{at}.mlp.experts" for at in range(50)]
    names = [f"{layer}.{n}.up_proj.weight" for layer in layers for n in range(2000)]
    listed = json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")}).encode()
    config = json.dumps(LLAMA | {"num_hidden_layers": 50}).encode()
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    _, found = parse("names", [listed, config])
    assert any(each.startswith("the files have no embedding") for each in found)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 2.0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 200) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
SOME = st.sampled_from([*llama(), "layers.999999.x", "h..1.x", "layers.1.", "wte.weight", ""])


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(st.sampled_from([*LLAMA, "layer_types", "text_config"]), JSON),
    st.dictionaries(SOME, st.tuples(st.text(max_size=3), st.lists(st.integers(0, 9), max_size=3))),
)
def test_any_configuration_and_tensors_are_compared(
    config: Doc, tensors: dict[str, tuple[str, list[int]]]
) -> None:
    text = json.dumps({"model_type": "llama"} | config).encode()
    _, found = parse("headers", [text, b"{}", header(tensors)])
    assert all(isinstance(each, str) for each in found)
