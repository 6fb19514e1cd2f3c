"""A model's configuration with few layers, to try what does not depend on their number."""

from __future__ import annotations

import copy
from typing import Any


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
