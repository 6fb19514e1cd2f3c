"""Functions with a gradient of their own: short attention, and log-probs of chosen tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from paceline_trainer.step.chosen import BLOCK, chosen_logprobs
from paceline_trainer.step.short_attention import LONGEST, is_short, short_attention


def made(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def reference(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return functional.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_short_attention_is_torchs_attention(key_heads: int, causal: bool) -> None:
    torch.manual_seed(key_heads)
    queries = 7 if causal else 3
    query, key, value = made(5, 4, queries, 8), made(5, key_heads, 7, 8), made(5, key_heads, 7, 6)
    mask = None if causal else torch.rand(5, 1, queries, 7) > 0.5
    if mask is not None:
        mask[..., 0] = True
    given = torch.randn(5, 4, queries, 6, dtype=torch.float64)
    found: list[list[Tensor]] = []
    for out in (
        short_attention(query, key, value, mask, None),
        reference(query, key, value, mask),
    ):
        gradients = torch.autograd.grad(out, (query, key, value), given)
        found.append([out, *gradients])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_short_attention_takes_a_scale() -> None:
    query, key, value = made(2, 2, 4, 8), made(2, 2, 4, 8), made(2, 2, 4, 8)
    torch.testing.assert_close(
        short_attention(query, key, value, None, 0.3),
        functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3),
    )


def test_a_query_that_sees_nothing_is_finite() -> None:
    """Left padding has such queries; nothing reads their outputs, but NaN would spread."""
    query, key, value = (made(1, 1, 3, 4) for _ in range(3))
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    mask[:, :, 0] = False
    out = short_attention(query, key, value, mask, None)
    gradients = torch.autograd.grad(out[:, :, 1:].sum(), (query, key, value))
    assert all(each.isfinite().all() for each in (out, *gradients))
    assert not gradients[0][:, :, 0].any()


def test_bfloat16_is_as_exact_as_torchs_kernel() -> None:
    torch.manual_seed(0)
    exact = [made(16, 4, 9, 16), made(16, 2, 9, 16), made(16, 2, 9, 16)]
    given = torch.randn(16, 4, 9, 16, dtype=torch.float64)
    query, key, value = exact
    wanted = torch.autograd.grad(reference(query, key, value, None), exact, given)

    def errors(attention: Callable[..., Tensor]) -> list[float]:
        rounded = [each.detach().bfloat16().requires_grad_() for each in exact]
        out = attention(*rounded, None)
        found = torch.autograd.grad(out, rounded, given.bfloat16())
        pairs = zip(found, wanted, strict=True)
        return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]

    ours = errors(partial(short_attention, scaling=None))
    theirs = errors(reference)
    assert max(ours) < 1.5 * max(theirs)


def test_long_sequences_go_to_torchs_kernel() -> None:
    short, long = torch.empty(1, 1, LONGEST, 4), torch.empty(1, 1, LONGEST + 1, 4)
    assert is_short(short, short)
    assert not is_short(short, long)
    assert not is_short(short.to("meta"), short)


@pytest.mark.parametrize("temperature", [1.0, 0.7, "each"])
@pytest.mark.parametrize("rows", [1, 5])
def test_chosen_logprobs_are_those_of_log_softmax(temperature: float | str, rows: int) -> None:
    torch.manual_seed(rows)
    vocab = BLOCK // 2 - 1  # two rows to a block
    logits, targets = made(rows, vocab), torch.randint(0, vocab, (rows,))
    heat: Tensor | float = torch.rand(rows) + 0.5 if temperature == "each" else float(temperature)
    scaled = logits / (heat[:, None] if isinstance(heat, Tensor) else heat)
    wanted = scaled.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    given = torch.randn(rows, dtype=torch.float64)
    found = chosen_logprobs(logits, targets, heat)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(found, logits, given), torch.autograd.grad(wanted, logits, given)
    )


def test_chosen_logprobs_of_bfloat16_are_computed_in_float32() -> None:
    torch.manual_seed(0)
    logits = made(4, 1000, dtype=torch.bfloat16)
    found = chosen_logprobs(logits, torch.arange(4), 1.0)
    wanted = logits.detach().double().log_softmax(-1)[range(4), range(4)]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.detach().double(), wanted, atol=1e-5, rtol=0.0)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert gradient.dtype == torch.bfloat16


def test_no_chosen_tokens_have_no_logprobs() -> None:
    logits = made(0, 11)
    found = chosen_logprobs(logits, torch.zeros(0, dtype=torch.int64), 1.0)
    assert found.shape == (0,)
    assert torch.autograd.grad(found.sum(), logits)[0].shape == (0, 11)
