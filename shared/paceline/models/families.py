"""What is known of families of models without torch, which services that accept jobs do not have.

Trainer and torch engine ask a random model of the family themselves (`probe.py` of each); the tests
of these probes ask about the same families.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

UNTRAINED = frozenset(
    {
        *("bloom", "falcon", "gpt_neo", "gpt_oss", "llama4_text", "modernbert-decoder", "mpt"),
        "recurrent_gemma",
    }
)
"""Values of `model_type` whose log-probs the trainer would not compute: attention of their own,
sinks, outputs that are not a plain head over the last hidden states."""

UNSERVED = frozenset(
    {
        *("bamba", "bloom", "falcon", "falcon_mamba", "gpt_neo", "gpt_oss", "jamba", "mamba"),
        *("mamba2", "minimax", "modernbert-decoder", "mpt", "qwen3_5_text", "qwen3_next"),
        *("recurrent_gemma", "rwkv"),
    }
)
"""Values of `model_type` whose log-probs the torch engine would not compute: the same, and layers
that keep a state instead of keys and values."""

# Scale positions by the length of the sequence, once it is longer than in the model's pretraining.
_ROPE_BY_LENGTH = {"dynamic", "longrope"}


POSITIONS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"),
    *("seq_length", "n_ctx"),
)
"""Keys of `config.json` for the positions of a model, the first of which counts."""


def trained_positions(text: Mapping[str, Any]) -> float:
    """The positions that a model was made for, with its RoPE scaled; infinite if not said.

    Trainers and engines that go beyond them fail, or compute what nobody has trained.
    """
    most = next((text[key] for key in POSITIONS if text.get(key) is not None), None)
    if type(most) is not int:
        return math.inf
    return max(float(most), *(_stretched(scaling, most) for scaling in _scalings(text)))


def _stretched(scaling: Mapping[str, Any], most: int) -> float:
    """The positions before a RoPE is scaled, times the factor."""
    factor, before = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if not isinstance(factor, int | float):
        return 0.0
    return factor * (before if type(before) is int else most)


def _scalings(text: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The parameters of its RoPE, or those of each kind of its layers."""
    declared: Any = text.get("rope_parameters") or text.get("rope_scaling")
    rope = cast("dict[str, Any]", declared if isinstance(declared, dict) else {})
    yield rope
    yield from (value for value in rope.values() if isinstance(value, dict))


def max_positions(text: Mapping[str, Any]) -> int | None:
    """The positions that the torch engine can serve, of a text model's `config.json`.

    None: as many as needed.
    """
    most = next((text[key] for key in POSITIONS if text.get(key) is not None), None)
    for scaling in _scalings(text):
        kind = scaling.get("rope_type", scaling.get("type"))
        if isinstance(kind, str) and kind in _ROPE_BY_LENGTH:
            most = (
                scaling.get("original_max_position_embeddings")
                or text.get("original_max_position_embeddings")
                or most
            )
    return most if type(most) is int else None


def cache_argument(model: Any) -> str:
    """The name by which a model of transformers takes its keys and values, and returns them.

    Releases of transformers differ: a newer one warns of the older name, and is to drop it.
    """
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"
