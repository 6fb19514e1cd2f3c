"""Finds out, with a few tokens, whether this engine computes a model's own log-probs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.errors import InvalidError
from paceline.models.foreign_code import of_model
from paceline.models.shallow import fill_with_noise, with_few_tokens
from paceline_rollout.engines.torch.cache import Block, SlotCache
from paceline_rollout.engines.torch.forward import ATTENTION, ForwardPasses

TOLERANCE = 1e-3
_TOKENS = 20
_PROMPT = 12
_WINDOWS = {"sliding_window": 6, "attention_chunk_size": 6}  # at most


def shares_prefixes(config: Any, device: str) -> bool:
    """Whether requests can read the keys and values of a common prefix in one place.

    Asks a model of random weights with the first layers of the real one and its attention: windows
    and chunks are shorter, so that few tokens show them.

    Raises:
        InvalidError: the engine's log-probs are not those of transformers' own code.
    """
    name = f"model type {config.model_type!r}"
    with of_model(f"{name}: the torch engine cannot compute it", unless=(torch.OutOfMemoryError,)):
        difference, shares = _compare(with_few_tokens(config, _WINDOWS), device)
    if not difference <= TOLERANCE:
        raise InvalidError(
            f"{name}: the torch engine's log-probs differ from the model's own by "
            f"{difference:.2g}; use another engine"
        )
    return shares


@torch.inference_mode()
def _compare(config: Any, device: str) -> tuple[float, bool]:
    """The largest difference of a log-prob, and whether attention reads what is cached."""
    model = _random_model(config, device)
    passes = ForwardPasses(model, device)
    vocab = int(config.get_text_config().vocab_size)
    tokens = [(7 * i * i + 3 * i + 1) % vocab for i in range(_TOKENS)]
    found = _decoded(passes, tokens)
    scored = torch.tensor(passes.score(tokens))
    model.set_attn_implementation("eager")
    ids = torch.tensor([tokens], device=device)
    logits = model(input_ids=ids, use_cache=False).logits[0].float().cpu()
    expected = torch.log_softmax(logits, -1)
    decoded = (found - expected[_PROMPT:]).abs().max()
    whole = (scored - expected[:-1].gather(1, ids[0, 1:, None].cpu())[:, 0]).abs().max()
    return float(torch.maximum(decoded, whole)), passes.shares_prefixes


def _decoded(passes: ForwardPasses, tokens: list[int]) -> Tensor:
    """Log-probs after each token from `_PROMPT` on, [_TOKENS - _PROMPT, V]."""
    block, cache = Block(1, _PROMPT), SlotCache()
    half = _PROMPT // 2
    passes.prefill(block, [tokens[:half]])
    passes.prefill(block, [tokens[half:_PROMPT]])
    cache.resize(1, 2 * _TOKENS, used=0)
    cache.insert(block, [0], 0)
    rows: list[Tensor] = []
    for place in range(_PROMPT, len(tokens)):
        at = torch.tensor([place], device=passes.device)
        token = torch.tensor([tokens[place]], device=passes.device)
        rows.append(passes.decode(token, at, at, cache, ()).float().cpu())
    return torch.log_softmax(torch.cat(rows), -1)


def _random_model(config: Any, device: str) -> Any:
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=ATTENTION, trust_remote_code=False
        )
    fill_with_noise(model, torch.Generator(device).manual_seed(0))
    return model.eval()
