"""A Hugging Face causal LM without weights of its own, and its three forward passes.

Legend of shapes: R rows, P padded prompt, L cached columns, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from paceline.errors import InvalidError
from paceline_rollout.engines.base import Snapshot
from paceline_rollout.engines.torch.attention import Here, attention
from paceline_rollout.engines.torch.cache import Block, Group, Layered, SlotCache
from paceline_rollout.engines.torch.packed import Packed
from paceline_rollout.engines.torch.weights import DTYPES, Places, Weights

ATTENTION = "paceline"
# `no_init_weights` replaces functions of torch for the whole process: two threads inside at once
# would leave them replaced, and no weights would be initialised any more.
_BUILDING = threading.Lock()
_SERVED_LAYERS = {"full_attention", "sliding_attention"}


class Policy:
    """The model: shape from `config.json`, weights by `prepare` and `exchange`."""

    def __init__(
        self, *, model_dir: Path, dtype: str, max_context: int, device: str, packed: bool = True
    ) -> None:
        config: Any = AutoConfig.from_pretrained(model_dir)
        text: Any = config.get_text_config()
        _check_layers(text, max_context)
        AttentionInterface.register(ATTENTION, attention)
        # Without a mask the fused kernel is told that it is causal; plain products are not.
        self._fused = getattr(text, "attn_logit_softcapping", None) is None
        with _BUILDING, torch.device(device), no_init_weights():
            self._model: Any = AutoModelForCausalLM.from_config(
                config,
                dtype=DTYPES[dtype],
                attn_implementation=ATTENTION,
            )
        self._model.tie_weights()
        self._model.eval().requires_grad_(False)
        self._here = Here()
        for module in self._model.modules():
            module.here = self._here
        self._places = Places(self._model, Packed(self._model) if packed else None)
        self.device = torch.device(device)
        self.vocab_size = int(text.vocab_size)
        self.token_bytes = _token_bytes(text, DTYPES[dtype].itemsize)

    def parameters(self) -> Iterator[Tensor]:
        """The weights."""
        yield from self._model.parameters()

    def prefill(self, block: Block, tokens: Sequence[Sequence[int]]) -> None:
        """Compute a block's next columns; rows that are shorter are padded on the right."""
        num, done = max(len(row) for row in tokens), block.done
        padded = [[*row, *([0] * (num - len(row)))] for row in tokens]
        tokens_RP = torch.tensor(padded, device=self.device)
        places_P = torch.arange(done, done + num, device=self.device)
        # The decoder alone: nobody needs the logits of a prompt.
        self._forward(
            self._model.get_decoder(),
            tokens_RP,
            places_P.expand_as(tokens_RP),
            block,
            self._causal(done, num),
        )
        block.done += num

    def decode(
        self,
        tokens_R: Tensor,
        positions_R: Tensor,
        at_R: Tensor,
        cache: SlotCache,
        groups: Sequence[Group],
    ) -> Tensor:
        """One more token for each row of the cache, into these columns; [R, V] logits."""
        width = min(-(-(int(at_R.max()) + 1) // 16) * 16, cache.columns)
        columns_L = torch.arange(width, device=self.device)
        hidden_RL = columns_L > at_R.unsqueeze(1)
        mask = hidden_RL[:, None, None].to(self._model.dtype) * self._least
        cache.aim(at_R, width, groups)
        places = positions_R.unsqueeze(1)
        return self._forward(self._model, tokens_R.unsqueeze(1), places, cache, mask).logits[:, -1]

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of tokens[1:] at temperature 1."""
        num = len(tokens)
        ids = torch.tensor([list(tokens)], device=self.device)
        places = torch.arange(num, device=self.device).unsqueeze(0)
        out = self._forward(self._model, ids, places, Block(1, num), self._causal(0, num))
        logp = torch.log_softmax(out.logits[0, :-1].float(), dim=-1)
        return logp.gather(1, ids[0, 1:].unsqueeze(1)).squeeze(1).tolist()

    def prepare(self, snapshot: Snapshot) -> Weights:
        """A snapshot made ready for `exchange`; see `Places.prepare`."""
        return self._places.prepare(snapshot)

    def exchange(self, weights: Weights) -> None:
        """Compute by these weights from now on; see `Places.exchange`."""
        self._places.exchange(weights)

    def _forward(
        self, module: Any, tokens: Tensor, places: Tensor, cache: Layered, mask: Tensor | None
    ) -> Any:
        self._here.cache = cache
        with torch.inference_mode():
            return module(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=places,
                past_key_values=cache,
                use_cache=True,
            )

    def _causal(self, done: int, num: int) -> Tensor | None:
        """The mask of `num` tokens behind `done` others; None where the kernel knows it."""
        if self._fused and not done:
            return None
        mask = torch.full((num, done + num), self._least, dtype=self._model.dtype)
        return mask.triu(done + 1)[None, None].to(self.device)

    @property
    def _least(self) -> float:
        return torch.finfo(self._model.dtype).min


def _token_bytes(text: Any, item: int) -> int:
    """Bytes of cache that one token of one row takes."""
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * item * int(text.num_hidden_layers) * int(heads) * int(size)


def _check_layers(text: Any, max_context: int) -> None:
    kinds = set(getattr(text, "layer_types", None) or {"full_attention"})
    if kinds - _SERVED_LAYERS:
        odd = sorted(kinds - _SERVED_LAYERS)[0]
        raise InvalidError(f"model: layers of type {odd!r}; allowed: {sorted(_SERVED_LAYERS)}")
    window = getattr(text, "sliding_window", None)
    if "sliding_attention" in kinds and window is not None and window < max_context:
        raise InvalidError(f"model: attention window {window}; allowed: {max_context} and more")
    most = getattr(text, "max_position_embeddings", None)
    if most is not None and most < max_context:
        raise InvalidError(
            f"sampling.max_context: {max_context}; allowed for this model: at most {most}"
        )
