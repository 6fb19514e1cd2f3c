"""Writes the tensors that every model of a family has, which gateways, without torch, ask for.

Source: models of two layers without weights, of each family with each of its switches the other
way: what all of them have. Families whose layers differ are left out (`UNIFORM`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from paceline.errors import PacelineError
from paceline.models.parse_child import EMBEDDING, HEAD, LAYER, TENSORS, UNIFORM
from paceline.weights.names import CheckpointNames

_FEW_EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
_HEAD_DIM = {"ministral", "nemotron"}  # which have none by default, and cannot do without
# What a configuration says of a multimodal model that has a text model of another name.
_TEXT_OF = {"gemma3": "gemma3_text"}
Names = tuple[frozenset[str], frozenset[str], frozenset[str]]


def files() -> dict[Path, str]:
    """The table as JSON, a line for each family."""
    rows = (f"{json.dumps(kind)}: {json.dumps(_row(kind))}" for kind in sorted(UNIFORM))
    return {TENSORS: "{\n" + ",\n".join(rows) + "\n}\n"}


def _row(kind: str) -> dict[str, Any]:
    sparse = _common(_variants(kind))
    dense = _common(_variants(kind, mlp_only_layers=[0, 1])) if "qwen" in kind else sparse
    outer, layer, memory = sparse
    forms = [layer, memory] if layer != memory else [layer]
    plain = AutoConfig.for_model(_TEXT_OF.get(kind, kind))
    row: dict[str, Any] = {
        "tied": bool(plain.tie_word_embeddings),
        "head_dim": _head_dim(kind),
        "grouped": hasattr(plain, "num_key_value_heads"),
        "outer": sorted(outer),
        "layer": [sorted(form) for form in forms],
    }
    return row if dense[1] == layer else {**row, "dense": sorted(dense[1])}


def _head_dim(kind: str) -> int | None:
    """That of the family; None: it follows from the other sizes."""
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4}
    found = getattr(AutoConfig.for_model(_TEXT_OF.get(kind, kind), **sizes), "head_dim", None)
    return None if found == 12 else found


def _common(variants: Iterable[Names]) -> Names:
    every = list(variants)
    outer, layer, memory = (frozenset.intersection(*each) for each in zip(*every, strict=True))
    return outer, layer, memory


def _variants(kind: str, **changes: Any) -> Iterator[Names]:
    """Names outside of layers, of a layer in files, and of a layer in memory."""
    changes |= {"num_hidden_layers": 2, "layer_types": None}
    changes |= {"head_dim": 8} if kind in _HEAD_DIM else {}
    plain = AutoConfig.for_model(_TEXT_OF.get(kind, kind), **changes)
    few = {name: num for name, num in _FEW_EXPERTS.items() if hasattr(plain, name)}
    plain = AutoConfig.for_model(_TEXT_OF.get(kind, kind), **changes, **few)
    yield _names(plain)
    for name, value in plain.to_dict().items():
        if isinstance(value, bool):
            try:
                other = {**changes, **few, name: not value}
                yield _names(AutoConfig.for_model(_TEXT_OF.get(kind, kind), **other))
            except (PacelineError, NotImplementedError, ValueError, TypeError):
                continue  # no such model


def _names(config: Any) -> Names:
    names = CheckpointNames(config)
    layers = [match for name in names.required if (match := LAYER.fullmatch(name))]
    memory = [m for c in names.conversions for n in c.memory if (m := LAYER.fullmatch(n))]
    outer = {name for name in names.required if not LAYER.fullmatch(name)}
    return (
        frozenset(_end(n) for n in outer if not EMBEDDING.fullmatch(n) and not HEAD.fullmatch(n)),
        frozenset(_of_any_expert(m.group(4)) for m in layers if m.group(3) == "0"),
        frozenset(m.group(4) for m in memory if m.group(3) == "0"),
    )


def _end(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _of_any_expert(name: str) -> str:
    return name.replace("experts.0.", "experts.*.").replace("experts.1.", "experts.*.")
