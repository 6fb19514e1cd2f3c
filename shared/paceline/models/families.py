"""What is known of families of models without torch, which services that accept jobs do not have.

Trainer and torch engine ask a random model of the family themselves (`probe.py` of each); the tests
of these probes ask about the same families.
"""

from __future__ import annotations

from collections.abc import Mapping
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


def max_positions(text: Mapping[str, Any]) -> int | None:
    """The positions that the torch engine can serve, of a text model's `config.json`.

    None: as many as needed.
    """
    most = text.get("max_position_embeddings", text.get("n_positions"))  # the latter of GPT-2
    declared: Any = text.get("rope_parameters") or text.get("rope_scaling")
    rope = cast("dict[str, Any]", declared if isinstance(declared, dict) else {})
    for scaling in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = scaling.get("rope_type", scaling.get("type"))
        if isinstance(kind, str) and kind in _ROPE_BY_LENGTH:
            most = (
                scaling.get("original_max_position_embeddings")
                or text.get("original_max_position_embeddings")
                or most
            )
    return most if type(most) is int else None
