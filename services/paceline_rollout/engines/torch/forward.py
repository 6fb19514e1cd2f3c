"""The three forward passes of a Hugging Face causal LM: prefill, decode, score.

Legend of shapes: R rows, P padded prompt, L cached columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from paceline.models.families import cache_argument
from paceline_rollout.engines.torch.attention import AttentionContext, attention
from paceline_rollout.engines.torch.cache import Block, Layered, PrefixGroup, SlotCache
from paceline_rollout.engines.torch.masks import Places, masks

ATTENTION = "paceline"


class ForwardPasses:
    """Computes with a model that was built with `attn_implementation=ATTENTION`."""

    def __init__(self, model: Any, device: str) -> None:
        self._model = model
        self.device = torch.device(device)
        self._cache = cache_argument(model)
        self._context = AttentionContext()
        for module in model.modules():
            module.paceline_context = self._context
            if getattr(module, "config", None) is not None:
                module.config.paceline_context = self._context
        text = model.config.get_text_config()
        # The fused kernel can be causal without a mask; plain matrix products cannot.
        self._fused = getattr(text, "attn_logit_softcapping", None) is None

    @property
    def shares_prefixes(self) -> bool:
        """Whether attention has read keys and values as they are cached, in all layers so far."""
        return self._context.reads_cache

    def prefill(self, block: Block, tokens: Sequence[Sequence[int]]) -> None:
        """Compute a block's next columns; shorter rows are padded on the right."""
        num, done = max(len(row) for row in tokens), block.done
        padded = [[*row, *([0] * (num - len(row)))] for row in tokens]
        tokens_RP = torch.tensor(padded, device=self.device)
        # Only the decoder: the logits of a prompt are not needed.
        self._forward(self._model.get_decoder(), tokens_RP, block, self._columns(done, num))
        block.done += num

    def decode(
        self,
        tokens_R: Tensor,
        positions_R: Tensor,
        columns_R: Tensor,
        cache: SlotCache,
        groups: Sequence[PrefixGroup],
    ) -> Tensor:
        """Compute one token per row, cached at column `columns_R`; returns [R, V] logits."""
        width = min(-(-(int(columns_R.max()) + 1) // 16) * 16, cache.columns)
        cache.aim(columns_R, width, groups)
        columns_L = torch.arange(width, device=self.device)
        keys_RL = columns_L + (positions_R - columns_R)[:, None]
        shared = max((group.prefix.length for group in groups), default=0)
        places = Places(positions_R[:, None], keys_RL, shared)
        return self._forward(self._model, tokens_R[:, None], cache, places).logits[:, -1]

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of tokens[1:] at temperature 1."""
        num = len(tokens)
        ids = torch.tensor([list(tokens)], device=self.device)
        out = self._forward(self._model, ids, Block(1, num), self._columns(0, num))
        logp = torch.log_softmax(out.logits[0, :-1].float(), dim=-1)
        return logp.gather(1, ids[0, 1:].unsqueeze(1)).squeeze(1).tolist()

    def _forward(self, module: Any, tokens: Tensor, cache: Layered, places: Places) -> Any:
        self._context.cache, self._context.places = cache, places
        with torch.inference_mode():
            return module(
                input_ids=tokens,
                position_ids=places.queries.expand_as(tokens),
                use_cache=True,
                **{self._cache: cache},
            )

    def _columns(self, done: int, num: int) -> Places:
        """The places of `num` tokens after `done` others."""
        columns = torch.arange(done + num, device=self.device)[None]
        return Places(columns[:, done:], columns, whole=self._fused and not done)


AttentionInterface.register(ATTENTION, attention)
AttentionMaskInterface.register(ATTENTION, masks)


def device_of(name: str) -> str:
    """The torch device of a name; `auto` is the GPU that this process sees, or the CPU."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
