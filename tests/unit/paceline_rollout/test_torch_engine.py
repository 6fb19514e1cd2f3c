from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.interfaces import Generation

Ask = Callable[..., Generation]
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11], [12], list(range(20))]


def reference(model: Any, prompt: list[int], tokens: list[int], temperature: float) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    logp = torch.log_softmax(logits / temperature, -1)
    return logp.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1).tolist()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
async def test_greedy_equals_generate(kind: str, model_of: Any, open_torch: Any, request_of: Ask):
    model = model_of(kind)
    async with open_torch(model) as out:
        asked = [request_of(str(i), p, temperature=0.0) for i, p in enumerate(PROMPTS)]
        await out.run(*asked)
        for name, prompt in enumerate(PROMPTS):
            wanted = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=8,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            assert out.tokens(str(name)) == wanted[0, len(prompt) :].tolist()
            assert out.end(str(name)).finish_reason == "length"


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
async def test_logprobs_equal_a_full_forward(
    kind: str, model_of: Any, open_torch: Any, request_of: Ask
):
    model = model_of(kind)
    async with open_torch(model) as out:
        asked = [
            request_of(f"{i}-{j}", p, temperature=0.7, seed=10 * i + j, max_tokens=30)
            for i, p in enumerate(PROMPTS)
            for j in range(4)
        ]
        await out.run(*asked)
        for one in asked:
            tokens = out.tokens(one.request_id)
            wanted = reference(model, list(one.tokens), tokens, 0.7)
            assert out.logprobs(one.request_id) == pytest.approx(wanted, abs=1e-5)
            assert out.versions(one.request_id) == [0] * 30
        assert out.engine.status().prompt_tokens == sum(map(len, PROMPTS))
