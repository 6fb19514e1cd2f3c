"""Kinds of a model's layers: those that are served, and a configuration with few of each."""

from __future__ import annotations

import copy
from typing import Any

SERVED_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layers, as `layer_types` names them, that the torch engine computes; others keep a state
instead of keys and values."""


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
