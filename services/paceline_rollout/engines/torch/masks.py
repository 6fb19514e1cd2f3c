"""Masks of attention, made of what the model itself says of each kind of its layers.

Legend of shapes: R rows, Q queries of a row, L columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import InvalidError


@dataclass(frozen=True, slots=True)
class Places:
    """Positions in their contexts of the tokens of one forward pass."""

    queries: Tensor  # [R, Q], or [1, Q] if they are the same in all rows
    keys: Tensor  # [R, L] of the rows' own columns, or [1, L]
    shared: int = 0  # tokens of the longest prefix that a row shares with others
    whole: bool = False  # the queries are all tokens that there are, in order


def masks(
    *,
    config: Any,
    mask_function: Callable[..., Tensor],
    dtype: torch.dtype,
    allow_is_causal_skip: bool = False,
    local_size: int | None = None,
    **_: Any,
) -> Tensor | None:
    """What is added to the scores of a kind of layers, [R or 1, 1, Q, L]; None: causal attention.

    Hugging Face models call it once for each kind in a forward pass. `mask_function` says which
    keys a query sees, by their positions. For layers with a window or chunks, columns of the shared
    prefix come before the own ones.

    Raises:
        InvalidError: the attention is not causal.
    """
    if not allow_is_causal_skip:
        raise InvalidError("model: attention that is not causal; the torch engine has none")
    places: Places = config.paceline_context.places
    keys, longest = places.keys, places.shared + places.keys.shape[1]
    local = local_size is not None and local_size < longest
    if places.whole and not local:
        return None
    if local and places.shared:
        shared = torch.arange(places.shared, device=keys.device).expand(keys.shape[0], -1)
        keys = torch.cat([shared, keys], dim=1)
    queries = places.queries[:, None, :, None]
    rows = torch.arange(queries.shape[0], device=keys.device)[:, None, None, None]
    seen = mask_function(rows, torch.zeros_like(rows), queries, keys[:, None, None, :])
    return (~seen).to(dtype) * torch.finfo(dtype).min
