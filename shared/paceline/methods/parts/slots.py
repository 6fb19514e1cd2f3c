"""The slots of an objective, in the order in which the trainer calls them.

`shaping -> corrections -> surrogate -> regularisers -> aggregation -> hooks`. A slot is a function
of tokens and options. One that looks at the whole update before its first gradient declares a plan
with `planned`, and is called with what the plan returned as second argument:

    def threshold(whole: WholeBatch, options: MyOptions) -> float: ...

    @planned(threshold)
    def my_correction(tokens: TokenBatch, threshold: float, options: MyOptions) -> Tensor: ...

A surrogate or regulariser that needs the distribution over the whole vocabulary declares a function
of logits with `reads_logits`, and finds its result in `tokens.of_logits`. It is called inside the
head, on a chunk of tokens at a time, so that logits of all tokens never exist at once:

    def margin(rows: LogitRows, options: MyOptions) -> Tensor: ...   # [n]

    @reads_logits(margin)
    def my_surrogate(tokens: TokenBatch, options: MyOptions) -> TokenLoss: ...

`options` is a pydantic model, which the descriptor of the slot names too; its module must not
import torch, as options are checked at submit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import Tensor

from paceline.methods.parts.batch import TokenBatch, TokenLoss
from paceline.methods.parts.whole_batch import WholeBatch

F = TypeVar("F", bound=Callable[..., Any])
Plan = Callable[[WholeBatch, Any], Any]
_ATTRIBUTE = "__paceline_plan__"
_LOGITS = "__paceline_logits__"


class Shaping(Protocol):
    """Changes advantages with what only the trainer sees."""

    def __call__(self, tokens: TokenBatch, *plan: Any, options: Any) -> Tensor:
        """Advantages [N], without gradient."""
        ...


class Correction(Protocol):
    """Weights of tokens for off-policy data; those of several corrections are multiplied."""

    def __call__(self, tokens: TokenBatch, *plan: Any, options: Any) -> Tensor:
        """Weights >= 0 [N], without gradient; a mask is a weight of 0 or 1."""
        ...


class Surrogate(Protocol):
    """The policy-gradient loss of each token."""

    def __call__(self, tokens: TokenBatch, *plan: Any, options: Any) -> TokenLoss:
        """The loss of each token, before corrections."""
        ...


class Regulariser(Protocol):
    """A loss that is added, such as a KL to a reference or an entropy bonus."""

    def __call__(self, tokens: TokenBatch, *plan: Any, options: Any) -> Tensor:
        """The term added to the loss of each token, [N]; `tokens.correction` has the weights."""
        ...


class Aggregation(Protocol):
    """One number from the losses of tokens."""

    def __call__(self, losses: Tensor, tokens: TokenBatch, options: Any) -> Tensor:
        """A number; its sum over micro-batches and ranks is exact with `tokens.scale`."""
        ...


@dataclass(frozen=True, slots=True)
class StepScale:
    """Result of a hook: a factor of the learning rate, and numbers for the log."""

    factor: float
    """1: none; 0: this update does not happen."""
    log: dict[str, float] = field(default_factory=dict[str, float])


class Hook(Protocol):
    """Called after the gradients of an update, before the optimiser takes its step."""

    def __call__(self, whole: WholeBatch, options: Any) -> StepScale:
        """The factors of several hooks are multiplied; `whole` has all tokens of the update."""
        ...


@dataclass(frozen=True, slots=True)
class LogitRows:
    """Some tokens of a micro-batch and their logits, inside the head."""

    logits: Tensor  # float32 [n, vocabulary], at the sampling temperature, with a gradient
    targets: Tensor  # int64 [n]
    keys: Tensor  # int64 [n], see `TokenBatch.keys`
    step: int


OfLogits = Callable[[LogitRows, Any], Tensor]


@dataclass(frozen=True, slots=True)
class Planned:
    """See `planned`."""

    plan: Plan
    needs_logprobs: bool


def planned(plan: Plan, *, needs_logprobs: bool = True) -> Callable[[F], F]:
    """Decorates a slot: `plan(whole, options)` is called once per update, before its gradients.

    Args:
        plan: it may return anything; what it finds has to be the same for every split into ranks.
        needs_logprobs: whether it reads `whole.tokens.logprobs`, which costs a forward pass without
            gradient for each mini-batch. Without it they are those of the proximal policy.
    """

    def mark(slot: F) -> F:
        setattr(slot, _ATTRIBUTE, Planned(plan, needs_logprobs))
        return slot

    return mark


def plan_of(slot: Callable[..., Any]) -> Planned | None:
    """The plan of a slot; None if it has none."""
    return getattr(slot, _ATTRIBUTE, None)


def reads_logits(function: OfLogits) -> Callable[[F], F]:
    """Decorates a slot: `function(rows, options)` returns a number for each row, [n].

    It is called again in the backward pass, and has to return the same numbers then.
    """

    def mark(slot: F) -> F:
        setattr(slot, _LOGITS, function)
        return slot

    return mark


def logits_of(slot: Callable[..., Any]) -> OfLogits | None:
    """The slot's function of logits; None if it does not read them."""
    return getattr(slot, _LOGITS, None)
