"""The tensors of a fake SGLang server, without their values.

As SGLang's loaders do, it keeps several tensors of a checkpoint in one of its own, and skips those
whose names it does not know without a word.
"""

from __future__ import annotations

import pickletools
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

_DUMMY = "dummy"


class FakeWeights:
    """The tensors of a model of a family like Llama, Qwen2, Qwen3 or Qwen3-MoE."""

    def __init__(self, config: Mapping[str, Any], *, forgets: str = "") -> None:
        """`forgets`: a part of the names that the loader skips although the model has them.

        With `@N` at its end it skips them only once it has loaded so many versions.
        """
        self._own = _own_names(config)
        self._part, _, versions = forgets.partition("@")
        self._left = int(versions or 0)
        self._loaded = {own: {own: _DUMMY} for own in _own_names(config).values()}
        self._new: set[str] = set()

    def load(self, names: Iterable[str], version: str | None) -> None:
        """Take tensors; those of several calls belong to the next version that is told."""
        forgets = self._part if not self._left else ""
        self._new |= {name for name in self._own.keys() & set(names) if not _in(forgets, name)}
        if version is None:
            return
        for name in self._new:
            parts = self._loaded[self._own[name]]
            parts.pop(self._own[name], None)
            parts[name] = version
        self._new.clear()
        self._left = max(self._left - 1, 0)

    def checksums(self) -> dict[str, str]:
        """By SGLang's names."""
        return {own: checksum(str(sorted(parts.items()))) for own, parts in self._loaded.items()}


def _in(part: str, name: str) -> bool:
    return bool(part) and part in name


def checksum(text: str) -> str:
    """A checksum as SGLang writes it."""
    return f"{zlib.crc32(text.encode()):016x}"


def names_in_pickle(data: bytes) -> set[str]:
    """All texts in a pickle, names of tensors among them, without loading it."""
    return {value for _, value, _ in pickletools.genops(data) if isinstance(value, str)}


def _own_names(config: Mapping[str, Any]) -> dict[str, str]:
    """SGLang's name of each tensor of a checkpoint."""
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    if not config.get("tie_word_embeddings"):
        names.append("lm_head.weight")
    own = {name: name for name in names}
    for layer in range(int(config["num_hidden_layers"])):
        stem = f"model.layers.{layer}."
        own |= {stem + name: stem + renamed for name, renamed in _of_layer(config).items()}
    return own


def _of_layer(config: Mapping[str, Any]) -> dict[str, str]:
    kind = str(config["model_type"])
    alone = ["self_attn.o_proj.weight", "input_layernorm.weight", "post_attention_layernorm.weight"]
    if kind.startswith("qwen3"):
        alone += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    own = {name: name for name in alone}
    for part in ("weight", "bias") if kind == "qwen2" else ("weight",):
        own |= {f"self_attn.{x}_proj.{part}": f"self_attn.qkv_proj.{part}" for x in "qkv"}
    if num := int(config.get("num_experts", config.get("num_local_experts", 0))):
        own["mlp.gate.weight"] = "mlp.gate.weight"
        for expert in range(num):
            stem = f"mlp.experts.{expert}"
            own |= {f"{stem}.{x}_proj.weight": "mlp.experts.w13_weight" for x in ("gate", "up")}
            own[f"{stem}.down_proj.weight"] = "mlp.experts.w2_weight"
        return own
    own |= {f"mlp.{x}_proj.weight": "mlp.gate_up_proj.weight" for x in ("gate", "up")}
    return own | {"mlp.down_proj.weight": "mlp.down_proj.weight"}
