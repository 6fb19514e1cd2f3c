"""A Hugging Face causal LM without weights of its own, and its three forward passes.

Legend of shapes: R rows, P padded prompt, L cached columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from paceline.errors import InvalidError
from paceline_rollout.engines.base import Snapshot
from paceline_rollout.engines.torch.cache import PrefillCache, SlotCache

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ATTENTION = "paceline"
_EXTRAS = ("softcap", "s_aux", "position_bias", "cache")
_SERVED_LAYERS = {"full_attention", "sliding_attention"}


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Torch's attention, but plain batched products for one short query a row.

    The fused kernel pays for each (row, head) pair; with hundreds of short rows that is most of
    a decode step.
    """
    rows, heads, queries, size = query.shape
    short = queries == 1 and key.shape[2] <= 256
    plain = query.device.type == "cpu" and query.dtype == torch.float32
    extras = any(options.get(name) is not None for name in _EXTRAS)
    if attention_mask is None or extras or not (short and plain):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    scale = size**-0.5 if scaling is None else scaling
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
    scores = torch.matmul(grouped, key.transpose(2, 3)).mul_(scale).add_(attention_mask)
    mixed = torch.matmul(torch.softmax(scores, dim=-1), value)
    return mixed.reshape(rows, 1, heads, value.shape[3]), None


class Policy:
    """The model: shape from `config.json`, weights by `load`."""

    def __init__(self, *, model_dir: Path, dtype: str, max_context: int, device: str) -> None:
        config: Any = AutoConfig.from_pretrained(model_dir)
        text: Any = config.get_text_config()
        _check_layers(text, max_context)
        AttentionInterface.register(ATTENTION, attention)
        self._fused = getattr(text, "attn_logit_softcapping", None) is None
        with torch.device(device), no_init_weights():
            self._model: Any = AutoModelForCausalLM.from_config(
                config,
                dtype=DTYPES[dtype],
                attn_implementation=ATTENTION if self._fused else "eager",
            )
        self._model.tie_weights()
        self._model.eval().requires_grad_(False)
        self._last: Tensor | None = None
        self._model.get_output_embeddings().register_forward_pre_hook(self._needed_only)
        self.device = torch.device(device)
        self.vocab_size = int(text.vocab_size)
        self.token_bytes = _token_bytes(text, DTYPES[dtype].itemsize)

    def parameters(self) -> Iterator[Tensor]:
        """The weights."""
        yield from self._model.parameters()

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[PrefillCache, Tensor]:
        """Run prompts, padded on the right; what attention needs later, and [R, V] logits."""
        longest = max(len(p) for p in prompts)
        padded = [[*p, *([0] * (longest - len(p)))] for p in prompts]
        tokens_RP = torch.tensor(padded, device=self.device)
        self._last = torch.tensor([len(p) - 1 for p in prompts], device=self.device)
        cache = PrefillCache()
        logits = self._forward(
            tokens_RP, torch.arange(longest, device=self.device).expand_as(tokens_RP), cache, None
        )
        return cache, logits[:, -1]

    def decode(self, tokens_R: Tensor, positions_R: Tensor, cache: SlotCache) -> Tensor:
        """One more token for each row of the cache; [R, V] logits of what follows."""
        width = min(-(-(int(positions_R.max()) + 1) // 16) * 16, cache.columns)
        columns_L = torch.arange(width, device=self.device)
        hidden_RL = columns_L > positions_R.unsqueeze(1)
        least = torch.finfo(self._model.dtype).min
        mask = hidden_RL[:, None, None].to(self._model.dtype) * least
        cache.aim(positions_R, width)
        self._last = None
        return self._forward(tokens_R.unsqueeze(1), positions_R.unsqueeze(1), cache, mask)[:, -1]

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of tokens[1:] at temperature 1."""
        ids = torch.tensor([list(tokens)], device=self.device)
        self._last = None
        places = torch.arange(len(tokens), device=self.device).unsqueeze(0)
        logits = self._forward(ids, places, PrefillCache(), None)[0, :-1]
        logp = torch.log_softmax(logits.float(), dim=-1)
        return logp.gather(1, ids[0, 1:].unsqueeze(1)).squeeze(1).tolist()

    def load(self, snapshot: Snapshot) -> None:
        """Copy a snapshot into the parameters; raises before anything is changed.

        Raises:
            InvalidError: a tensor has no place here, another shape, or is missing.
        """
        places: dict[str, Tensor] = self._model.state_dict()
        found = [
            (_place(places, entry.name, entry.shape), entry, data)
            for entry, data in snapshot.tensors()
        ]
        tied = [(places[name], places[same]) for name, same in snapshot.header.tied]
        self._check_complete({e.name for _, e, _ in found}, places, snapshot.header.tied)
        for place, entry, data in found:
            flat = torch.frombuffer(data, dtype=DTYPES[entry.dtype])
            place.copy_(flat.view(entry.shape))
        for place, source in tied:
            if place.data_ptr() != source.data_ptr():
                place.copy_(source)

    def _check_complete(
        self, names: set[str], places: dict[str, Tensor], tied: tuple[tuple[str, str], ...]
    ) -> None:
        covered = {places[name].data_ptr() for name in names | {n for n, _ in tied}}
        missing = [n for n, p in self._model.named_parameters() if p.data_ptr() not in covered]
        if missing:
            raise InvalidError(f"snapshot: tensor {missing[0]!r} is missing")

    def _forward(
        self, tokens: Tensor, positions: Tensor, cache: Any, mask: Tensor | None
    ) -> Tensor:
        if mask is None and not self._fused:
            # Without a mask the fused kernel is told that it is causal; the plain one is not.
            num = tokens.shape[1]
            least = torch.finfo(self._model.dtype).min
            mask = torch.full((num, num), least, dtype=self._model.dtype, device=self.device)
            mask = mask.triu(1)[None, None]
        with torch.inference_mode():
            return self._model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            ).logits

    def _needed_only(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Keep each row's last real position from the output layer, which is the widest one."""
        if self._last is None:
            return inputs
        hidden = inputs[0]
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        return (hidden[rows, self._last].unsqueeze(1), *inputs[1:])


def _place(places: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    if name not in places:
        raise InvalidError(f"snapshot: tensor {name!r} is unknown to this model")
    place = places[name]
    if tuple(place.shape) != tuple(shape):
        wanted = tuple(place.shape)
        raise InvalidError(f"snapshot: tensor {name!r} has shape {shape}; allowed: {wanted}")
    return place


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
