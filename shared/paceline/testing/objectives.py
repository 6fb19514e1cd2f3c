"""Contract tests for objectives; need torch, which is imported on the first call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, get_type_hints

from paceline.testing.common import expect, resolved

if TYPE_CHECKING:
    from paceline.methods.parts.batch import Loss, TokenBatch

LENGTHS = (5, 1, 8, 3)  # tokens of each sequence
SEED = 11


def fulfils_the_contract(plugin: Any, options: Mapping[str, Any] | None = None) -> None:
    """Check for a finite loss with a gradient that adds up over any split into micro-batches.

    `plugin` is `fn(batch: TokenBatch, options: Model) -> Loss` with a pydantic model of options.
    """
    loss_of = _bound(resolved("objectives", plugin), options or {})
    whole = token_batch()
    one = _checked(loss_of(whole), whole)
    for at in range(1, len(LENGTHS)):
        parts = [token_batch(first=0, last=at), token_batch(first=at, last=len(LENGTHS))]
        losses = [_checked(loss_of(part), part) for part in parts]
        _adds_up(one, losses, whole, parts)
    for apart in (-100.0, 100.0):
        extreme = token_batch(apart=apart)
        _checked(loss_of(extreme), extreme)
    proximal = token_batch(proximal=True)
    _checked(loss_of(proximal), proximal)
    empty = token_batch(first=0, last=0)
    value = float(loss_of(empty).value.detach())
    expect(value == 0.0, f"a micro-batch without tokens has a loss of {value}")


def token_batch(
    *, first: int = 0, last: int = len(LENGTHS), apart: float = 0.1, proximal: bool = False
) -> TokenBatch:
    """Some sequences of a fixed batch; policy and behaviour log-probs differ by about `apart`."""
    import torch

    from paceline.methods.parts.batch import Scale, TokenBatch

    random = torch.Generator().manual_seed(SEED)
    total = sum(LENGTHS)
    behaviour = -torch.rand(total, generator=random) - 0.1
    moved = behaviour + apart * (torch.rand(total, generator=random) - 0.3)
    between = behaviour + 0.05 * torch.rand(total, generator=random)
    advantages = torch.randn(len(LENGTHS), generator=random)
    sequences = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    own = (sequences >= first) & (sequences < last)
    return TokenBatch(
        logprobs=moved[own].clone().requires_grad_(),
        behaviour=behaviour[own],
        advantages=advantages[sequences][own],
        sequences=sequences[own] - first,
        num_sequences=last - first,
        scale=Scale(tokens=total, sequences=len(LENGTHS)),
        proximal=between[own] if proximal else None,
    )


def _bound(function: Any, options: Mapping[str, Any]) -> Callable[[TokenBatch], Loss]:
    expect(
        "options" in inspect.signature(function).parameters,
        f"{function!r} is not a function of (batch, options)",
    )
    model: Any = get_type_hints(function)["options"]
    given = model.model_validate(dict(options))
    return partial(function, options=given)


def _checked(loss: Loss, batch: TokenBatch) -> Loss:
    import torch

    expect(loss.value.ndim == 0, f"the loss has shape {tuple(loss.value.shape)}; expected a scalar")
    expect(torch.isfinite(loss.value), f"the loss is {loss.value}")
    batch.logprobs.grad = None
    loss.value.backward()  # pyright: ignore[reportUnknownMemberType]
    gradient = batch.logprobs.grad
    expect(gradient is not None, "no gradient reaches the log-probs")
    if gradient is not None:
        expect(torch.isfinite(gradient).all(), f"the gradient is {gradient}")
    for name, value in {**loss.sums, **loss.maxima}.items():
        expect(
            value.ndim == 0 and torch.isfinite(value),
            f"{name} is {value}; expected a finite scalar",
        )
    return loss


def _adds_up(one: Loss, losses: list[Loss], whole: TokenBatch, parts: list[TokenBatch]) -> None:
    import torch

    at_once = float(one.value.detach())
    total = sum(float(each.value.detach()) for each in losses)
    expect(
        abs(total - at_once) < 1e-4,
        f"the loss is {at_once} in one micro-batch and {total} in two micro-batches: divide by "
        "batch.scale, not by counts of the micro-batch",
    )
    gradients = [part.logprobs.grad for part in parts]
    joined = torch.cat([each for each in gradients if each is not None])
    assert whole.logprobs.grad is not None
    same = torch.allclose(joined, whole.logprobs.grad, atol=1e-5)
    expect(same, "the gradient differs between one micro-batch and two")
    for name, value in one.sums.items():
        found = sum(float(each.sums[name].detach()) for each in losses)
        expect(abs(found - float(value.detach())) < 1e-3, f"sums[{name!r}] does not add up")
