"""A Hugging Face causal LM and its three forward passes: prefill, decode, score.

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
from paceline.plugins import WeightSnapshot
from paceline_rollout.engines.torch.attention import AttentionContext, attention
from paceline_rollout.engines.torch.cache import Block, Layered, PrefixGroup, SlotCache
from paceline_rollout.engines.torch.packed import Packed
from paceline_rollout.engines.torch.weights import DTYPES, ModelTensors, Weights

ATTENTION = "paceline"
# `no_init_weights` patches functions of torch for the whole process: two threads in it at once
# would leave them patched, and weights would never be initialised again.
_BUILD_LOCK = threading.Lock()
_SERVED_LAYERS = {"full_attention", "sliding_attention"}


class TorchModel:
    """A model whose shape is in `config.json` and whose weights come from snapshots."""

    def __init__(
        self, *, model_dir: Path, dtype: str, max_context: int, device: str, packed: bool = True
    ) -> None:
        config: Any = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
        text: Any = config.get_text_config()
        _check_layers(text, max_context)
        AttentionInterface.register(ATTENTION, attention)
        # The fused kernel can be causal without a mask; plain matrix products cannot.
        self._fused = getattr(text, "attn_logit_softcapping", None) is None
        with _BUILD_LOCK, torch.device(device), no_init_weights():
            self._model: Any = AutoModelForCausalLM.from_config(
                config,
                dtype=DTYPES[dtype],
                attn_implementation=ATTENTION,
                trust_remote_code=False,
            )
        self._model.tie_weights()
        self._model.eval().requires_grad_(False)
        self._context = AttentionContext()
        for module in self._model.modules():
            module.paceline_context = self._context
        self._tensors = ModelTensors(self._model, Packed(self._model) if packed else None)
        self.device = torch.device(device)
        self.vocab_size = int(text.vocab_size)
        self.token_bytes = _token_bytes(text, DTYPES[dtype].itemsize)

    def parameters(self) -> Iterator[Tensor]:
        """The parameters of the model."""
        yield from self._model.parameters()

    def prefill(self, block: Block, tokens: Sequence[Sequence[int]]) -> None:
        """Compute a block's next columns; shorter rows are padded on the right."""
        num, done = max(len(row) for row in tokens), block.done
        padded = [[*row, *([0] * (num - len(row)))] for row in tokens]
        tokens_RP = torch.tensor(padded, device=self.device)
        positions_P = torch.arange(done, done + num, device=self.device)
        # Only the decoder: the logits of a prompt are not needed.
        self._forward(
            self._model.get_decoder(),
            tokens_RP,
            positions_P.expand_as(tokens_RP),
            block,
            self._causal(done, num),
        )
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
        columns_L = torch.arange(width, device=self.device)
        hidden_RL = columns_L > columns_R.unsqueeze(1)
        mask = hidden_RL[:, None, None].to(self._model.dtype) * self._min_value
        cache.aim(columns_R, width, groups)
        positions = positions_R.unsqueeze(1)
        return self._forward(self._model, tokens_R.unsqueeze(1), positions, cache, mask).logits[
            :, -1
        ]

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of tokens[1:] at temperature 1."""
        num = len(tokens)
        ids = torch.tensor([list(tokens)], device=self.device)
        positions = torch.arange(num, device=self.device).unsqueeze(0)
        out = self._forward(self._model, ids, positions, Block(1, num), self._causal(0, num))
        logp = torch.log_softmax(out.logits[0, :-1].float(), dim=-1)
        return logp.gather(1, ids[0, 1:].unsqueeze(1)).squeeze(1).tolist()

    def prepare(self, snapshot: WeightSnapshot) -> Weights:
        """Prepare a snapshot for `exchange`; see `ModelTensors.prepare`."""
        return self._tensors.prepare(snapshot)

    def exchange(self, weights: Weights) -> None:
        """Replace the weights; see `ModelTensors.exchange`."""
        self._tensors.exchange(weights)

    def _forward(
        self, module: Any, tokens: Tensor, positions: Tensor, cache: Layered, mask: Tensor | None
    ) -> Any:
        self._context.cache = cache
        with torch.inference_mode():
            return module(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )

    def _causal(self, done: int, num: int) -> Tensor | None:
        """The mask of `num` tokens after `done` others; None if the kernel is causal itself."""
        if self._fused and not done:
            return None
        mask = torch.full((num, done + num), self._min_value, dtype=self._model.dtype)
        return mask.triu(done + 1)[None, None].to(self.device)

    @property
    def _min_value(self) -> float:
        return torch.finfo(self._model.dtype).min


def _token_bytes(text: Any, item: int) -> int:
    """Bytes of KV cache per token."""
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * item * int(text.num_hidden_layers) * int(heads) * int(size)


def _check_layers(text: Any, max_context: int) -> None:
    kinds = set(getattr(text, "layer_types", None) or {"full_attention"})
    if kinds - _SERVED_LAYERS:
        unsupported = sorted(kinds - _SERVED_LAYERS)[0]
        raise InvalidError(
            f"model: layers of type {unsupported!r}; allowed: {sorted(_SERVED_LAYERS)}"
        )
    window = getattr(text, "sliding_window", None)
    if "sliding_attention" in kinds and window is not None and window < max_context:
        raise InvalidError(f"model: attention window {window}; allowed: {max_context} and more")
    max_positions = getattr(text, "max_position_embeddings", None)
    if max_positions is not None and max_positions < max_context:
        raise InvalidError(
            f"sampling.max_context: {max_context}; allowed for this model: at most {max_positions}"
        )
