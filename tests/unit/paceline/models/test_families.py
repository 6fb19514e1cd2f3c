"""What is known of families without torch is what the probes find, see both `test_families.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.models.families import UNSERVED, UNTRAINED, cache_argument, max_positions
from paceline_harness.models.families import (
    NAMES,
    REFUSED_BY_ENGINE,
    REFUSED_BY_TRAINER,
    SERVED,
    TRAINED,
    config_of,
)

# For what its configuration says otherwise.
BY_CONFIG = ("llama_dynamic_rope", "phi3_longrope", "gemma3_bidirectional")


def types_of(families: tuple[str, ...]) -> set[str]:
    return {config_of(family).model_type for family in families}


def test_families_that_the_trainer_refuses_are_refused_at_submit() -> None:
    assert types_of(REFUSED_BY_TRAINER) == UNTRAINED
    assert not types_of(TRAINED) & UNTRAINED


def test_families_that_the_torch_engine_refuses_are_refused_at_submit() -> None:
    refused = tuple(family for family in REFUSED_BY_ENGINE if family not in BY_CONFIG)
    assert types_of(refused) <= UNSERVED
    assert not types_of(SERVED) & UNSERVED


@pytest.mark.parametrize("family", NAMES)
def test_positions_of_a_file_are_those_of_the_engine(family: str, tmp_path: Path) -> None:
    config = config_of(family)
    config.save_pretrained(tmp_path)
    parsed: dict[str, Any] = json.loads((tmp_path / "config.json").read_text())
    expected = 16 if family in BY_CONFIG[:2] else getattr(config, "max_position_embeddings", None)
    assert max_positions(config.to_dict()) == expected
    if {"max_position_embeddings", "n_positions"} & parsed.keys():
        assert max_positions(parsed) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ({}, None),
        ({"max_position_embeddings": "many"}, None),
        ({"max_position_embeddings": 64, "rope_scaling": "odd"}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": ["dynamic"]}}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "linear"}}, 64),
        (
            {
                "max_position_embeddings": 64,
                "original_max_position_embeddings": 16,
                "rope_scaling": {"type": "longrope"},
            },
            16,
        ),
        (
            {
                "max_position_embeddings": 64,
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "dynamic",
                        "original_max_position_embeddings": 32,
                    },
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            32,
        ),
    ],
)
def test_positions_before_scaling_by_length(text: dict[str, Any], expected: int | None) -> None:
    assert max_positions(text) == expected


class Older:
    def forward(self, input_ids: Any, past_key_values: Any = None) -> None: ...


class Newer:
    def forward(self, input_ids: Any, cache: Any = None) -> None: ...


def test_the_cache_has_the_name_that_the_release_of_transformers_gives_it() -> None:
    assert cache_argument(Older()) == "past_key_values"
    assert cache_argument(Newer()) == "cache"
