"""Tensors of every family have the names of its checkpoints, and come back from them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.errors import IntegrityError, InvalidError
from paceline.weights import SnapshotHeader, plan
from paceline.weights.names import CheckpointNames, check_layout
from paceline.weights.snapshot.manifest import header_from_proto, header_to_proto
from paceline_harness.models.families import CONVERTED, NAMES, config_of, save_family


@pytest.mark.parametrize("family", NAMES)
def test_names_are_those_that_transformers_saves(family: str, tmp_path: Path) -> None:
    folder = save_family(family, tmp_path)
    saved = load_file(folder / "model.safetensors")
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    memory = model.state_dict()
    names = CheckpointNames(model.config)
    assert names.required == saved.keys()
    assert all(names.shapes[name] == tuple(value.shape) for name, value in saved.items())
    checkpoint: dict[str, torch.Tensor] = {}
    for conversion in names.conversions:
        checkpoint |= names.to_checkpoint(conversion, memory)
    assert all(torch.equal(checkpoint[name], value) for name, value in saved.items())
    back = dict(names.all_to_memory(checkpoint))
    assert back.keys() == memory.keys()
    assert all(torch.equal(back[name], value) for name, value in memory.items())


def test_several_tensors_that_files_have_as_one() -> None:
    config = AutoConfig.for_model(
        "hrm_text",
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=8,
        pad_token_id=None,
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    memory, names = model.state_dict(), CheckpointNames(config)
    stem = "model.L_module.layers.0"
    gate, up = f"{stem}.mlp.gate_proj", f"{stem}.mlp.up_proj"
    conversion = names.of(f"{up}.weight")
    assert conversion.memory == (f"{gate}.weight", f"{up}.weight")
    found = names.to_checkpoint(conversion, memory)
    whole = torch.cat([memory[name] for name in conversion.memory])
    assert torch.equal(found[f"{stem}.mlp.gate_up_proj.weight"], whole)
    back = names.to_memory(conversion, found)
    assert all(torch.equal(back[name], memory[name]) for name in conversion.memory)
    assert not names.takes(f"{gate}.lora_A.weight")
    assert names.takes(f"{stem}.self_attn.o_proj.lora_B.weight")


@pytest.mark.parametrize("family", CONVERTED)
def test_a_conversion_is_as_small_as_it_can_be(family: str) -> None:
    """So what is converted takes the memory of one tensor, not of a layer or a model."""
    names = CheckpointNames(config_of(family))
    assert all(len(each.memory) == 1 for each in names.conversions)
    assert [each.memory for each in names.conversions] != [
        each.checkpoint for each in names.conversions
    ]


def test_an_adapter_has_the_name_of_its_weight() -> None:
    names = CheckpointNames(config_of("granitemoe"))
    router = "model.layers.0.block_sparse_moe.router"
    assert names.of(f"{router}.lora_A.weight").checkpoint == (f"{router}.layer.lora_A.weight",)


def test_an_adapter_of_no_layer_is_refused() -> None:
    names = CheckpointNames(config_of("qwen3_moe"))
    with pytest.raises(InvalidError, match=r"mlp\.experts\.weight' is unknown"):
        names.of("model.layers.0.mlp.experts.lora_A.weight")


def test_tied_pairs_have_checkpoint_names() -> None:
    names = CheckpointNames(config_of("gpt_neox"))
    pair = ("lm_head.weight", "gpt_neox.embed_in.weight")
    assert names.tied([pair]) == (("embed_out.weight", pair[1]),)


@dataclass(frozen=True)
class Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]


SHAPES = {"a": (4, 2), "b": (4, 2), "c": (3,), "d": (1,)}


@given(
    st.sets(st.sampled_from([*SHAPES, "x"])),
    st.dictionaries(st.sampled_from([*SHAPES, "x"]), st.sampled_from([*SHAPES, "x"])),
    st.dictionaries(st.sampled_from([*SHAPES]), st.sampled_from([(4, 2), (3,)])),
)
def test_a_layout_is_taken_exactly_if_every_tensor_fits(
    sent: set[str], tied: dict[str, str], shapes: dict[str, tuple[int, ...]]
) -> None:
    entries = [Entry(name, "float32", shapes.get(name, SHAPES.get(name, ()))) for name in sent]
    values = {each.name: each.shape for each in entries}
    right = (
        values.keys() | tied.keys() >= {"a", "b", "c"}  # d is not required
        and values.keys() >= set(tied.values())
        and {**{n: values.get(same) for n, same in tied.items()}, **values}.items()
        <= SHAPES.items()
        and all(SHAPES.get(name) == values.get(same) for name, same in tied.items())
    )
    refused = nullcontext() if right else pytest.raises(InvalidError, match="snapshot: tensor '")
    with refused:
        check_layout(entries, tied.items(), shapes=SHAPES, required={"a", "b", "c"})


def header(**changes: Any) -> SnapshotHeader:
    entries, total = plan([("a", "float32", (4,))])
    return SnapshotHeader("job", 1, 1, 0, -1, 1, total, 256, entries, **changes)


@pytest.mark.parametrize("names", ["memory", "checkpoint"])
def test_the_kind_of_names_is_in_the_header(names: Any) -> None:
    assert header_from_proto(header_to_proto(header(names=names))).names == names


def test_a_header_of_the_previous_release_has_names_in_memory() -> None:
    message = header_to_proto(header())
    assert not message.names
    assert header_from_proto(message).names == "memory"


def test_a_header_with_names_of_another_kind_is_refused() -> None:
    message = header_to_proto(header())
    message.names = "fused"
    with pytest.raises(IntegrityError, match="'fused' names; allowed: checkpoint"):
        header_from_proto(message)
