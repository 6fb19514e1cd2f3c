"""Kinds of a model's layers: those that are served, and a configuration with few of each."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from math import gcd
from typing import Any

SERVED_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layers, as `layer_types` names them, that the torch engine computes; others keep a state
instead of keys and values."""

_VOCAB = 64
# Widths from which no other size of a model follows.
_INNER = (
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("shared_intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"),
)
_MOST_INNER = 16
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_CHOSEN = "num_experts_per_tok"
_MOST_EXPERTS = {**dict.fromkeys(_EXPERTS, 16), _CHOSEN: 4}
# Of layers before those with experts, which are then the first ones.
_DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_HEADS = ("num_attention_heads", "num_key_value_heads")
_WIDTHS = ("hidden_size", "word_embed_proj_dim")


def shallow(config: Any) -> Any:
    """The configuration of a model with only as many layers as there are kinds of them.

    One whose kinds of layers cannot be set is returned with all of its layers.
    """
    cut = copy.deepcopy(config)
    text = cut.get_text_config()
    kinds: list[str] = list(getattr(text, "layer_types", None) or [])
    num = max((kinds.index(kind) + 1 for kind in set(kinds)), default=1)
    if num >= int(text.num_hidden_layers):
        return cut
    if kinds:
        try:
            text.layer_types = kinds[:num]
        except AttributeError:  # a property, which follows from other fields
            return cut
    text.num_hidden_layers = num
    return cut


def with_few_tokens(config: Any, most: Mapping[str, int] | None = None) -> Any:
    """`shallow`, with a vocabulary of at most 64 tokens; `most`: bounds of other fields."""
    config = copy.deepcopy(config)
    _bound(config.get_text_config(), dict.fromkeys(_DENSE, 0))
    cut = shallow(config)
    text = cut.get_text_config()
    pad: Any = getattr(text, "pad_token_id", None)
    if pad is not None and 0 <= pad < text.vocab_size:
        text.pad_token_id = 0
    _bound(text, {"vocab_size": _VOCAB, **(most or {})})
    return cut


def narrow(config: Any) -> Any:
    """`with_few_tokens`, with narrow layers between its attention."""
    cut = with_few_tokens(config, dict.fromkeys(_INNER, _MOST_INNER))
    vision: Any = getattr(cut, "vision_config", None)
    if vision is not None:
        _bound(vision, {"num_hidden_layers": 1})
    return cut


def tiny(config: Any) -> Any:
    """`narrow`, as wide as two attention heads of the same size are, and with few experts."""
    cut = narrow(config)
    text = cut.get_text_config()
    _bound_experts(text)
    heads = {name: size for name in _HEADS if type(size := getattr(text, name, None)) is int}
    widths = {name: size for name in _WIDTHS if type(size := getattr(text, name, None)) is int}
    if "num_attention_heads" not in heads or min(heads.values()) < 1:
        return cut
    factor = gcd(*heads.values())
    factor = factor // 2 if factor % 2 == 0 else factor
    if all(size % factor == 0 for size in widths.values()):
        for name, size in (heads | widths).items():
            setattr(text, name, size // factor)
    return cut


def num_elements(config: Any) -> int:
    """About how many parameters a layer has that is cut by `narrow`."""
    text = config.get_text_config()
    sizes = {name: size for name, size in vars(text).items() if type(size) is int}
    width = sizes.get("hidden_size", 1)
    experts = max([1, *(sizes.get(name, 1) for name in _EXPERTS)])
    return width * (4 * width + 3 * _MOST_INNER * experts)


def fill_with_noise(model: Any, generator: Any = None) -> None:
    """Give all parameters random values of the size that keeps activations near one."""
    for value in model.parameters():
        if value.dim() > 1:
            value.normal_(std=value.shape[-1] ** -0.5, generator=generator)
        else:
            value.add_(value.new_empty(value.shape).normal_(generator=generator), alpha=0.1)


def _bound_experts(text: Any) -> None:
    """Unless they are in groups, or fewer than are chosen: what does not fit must not get to."""
    numbers = [size for name in _EXPERTS if type(size := getattr(text, name, None)) is int]
    chosen = getattr(text, _CHOSEN, None)
    grouped = (getattr(text, "n_group", None) or 1) != 1
    if not grouped and type(chosen) is int and all(chosen <= number for number in numbers):
        _bound(text, _MOST_EXPERTS)


def _bound(text: Any, most: Mapping[str, int]) -> None:
    for name, bound in most.items():
        size = getattr(text, name, None)
        if isinstance(size, int) and size > bound:
            setattr(text, name, bound)
