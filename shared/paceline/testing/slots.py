"""The contract of the slots of an objective; needs torch, which is imported when it is called."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from threading import Barrier
from typing import TYPE_CHECKING, Any

from paceline.testing.common import expect, resolved

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from paceline.methods.objective.pipeline import Objective, UpdatePlan
    from paceline.methods.objective.slot import Slot
    from paceline.methods.parts.batch import Loss, TokenBatch

    Floats = NDArray[np.float64]

LENGTHS = (5, 1, 8, 3)  # tokens of each sequence
OTHER_LOGITS = (0.3, -0.2, 0.0)  # of the tokens that were not sampled
COLUMNS = ("behaviour", "proximal", "reference", "entropy")  # may not be finite
SEED = 11
SPLITS = (2, 4)  # ranks between which the update is split


def fulfils_the_contract(kind: str, plugin: Any, options: Mapping[str, Any] | None = None) -> None:
    """A finite loss with a gradient, the same for every split into micro-batches and ranks.

    Also where an engine or a model has reported a log-prob or an entropy that is not finite.

    Of a proximal policy: log-probs of the right shape; of a hook: the same factor for every split.

    Args:
        kind: one of `registry.SLOTS`.
        plugin: the function of tokens and options, or its name.
        options: those that have no default, or others.
    """
    objective = objective_with(kind, plugin, options or {})
    whole = token_batch()
    if kind == "proximals":
        return _a_centre(objective)
    if kind == "hooks":
        return _a_hook(objective)
    one = _checked(objective, whole, _plan(objective, whole))
    for at in range(1, len(LENGTHS)):
        parts = [token_batch(first=0, last=at), token_batch(first=at, last=len(LENGTHS))]
        plan = _plan(objective, whole)
        losses = [_checked(objective, part, plan) for part in parts]
        _adds_up(one, losses, whole, parts)
    for ranks in SPLITS:
        _same_on_ranks(objective, whole, ranks)
    for apart in (-100.0, 100.0):
        extreme = token_batch(apart=apart)
        _checked(objective, extreme, _plan(objective, extreme))
    for column in COLUMNS:
        for value in (math.nan, -math.inf, math.inf):
            broken = _with_one(column, value)
            _checked(objective, broken, _plan(objective, broken))
    alone = replace(token_batch(), proximal=None)
    _checked(objective, alone, _plan(objective, alone))
    empty = token_batch(first=0, last=0)
    value = float(_checked(objective, empty, _plan(objective, whole)).value.detach())
    expect(value == 0.0, f"a micro-batch without tokens has a loss of {value}")


def objective_with(kind: str, plugin: Any, options: Mapping[str, Any]) -> Objective:
    """An objective with this slot; its others are REINFORCE and the mean over tokens."""
    from paceline.config.base import PluginSpec
    from paceline.methods.objective.pipeline import Objective
    from paceline.methods.objective.slot import bind, find_slot

    function = resolved(kind, plugin)
    name = plugin if isinstance(plugin, str) else getattr(plugin, "__name__", "plugin")
    slot = bind(function, options, where=f"{kind} {name!r}", name=name)
    slots: dict[str, Any] = {
        "proximal": find_slot("proximals", "proximal", PluginSpec(kind="behaviour")),
        "surrogate": find_slot("surrogates", "surrogate", PluginSpec(kind="reinforce")),
        "aggregation": find_slot("aggregations", "aggregation", PluginSpec(kind="token_mean")),
    }
    field, several = _FIELDS[kind]
    slots[field] = [slot] if several else slot
    return Objective(**slots)


_FIELDS = {
    "shapings": ("shaping", True),
    "corrections": ("corrections", True),
    "surrogates": ("surrogate", False),
    "regularisers": ("regularisers", True),
    "aggregations": ("aggregation", False),
    "proximals": ("proximal", False),
    "hooks": ("hooks", True),
}


def token_batch(*, first: int = 0, last: int = len(LENGTHS), apart: float = 0.1) -> TokenBatch:
    """Some sequences of a fixed batch; policy and behaviour are about `apart` from each other."""
    import torch

    from paceline.methods.parts.batch import Scale, TokenBatch

    random = torch.Generator().manual_seed(SEED)
    total = sum(LENGTHS)
    behaviour = -torch.rand(total, generator=random) - 0.1
    moved = behaviour + apart * (torch.rand(total, generator=random) - 0.3)
    between = behaviour + 0.05 * torch.rand(total, generator=random)
    reference = behaviour - 0.2 * torch.rand(total, generator=random)
    entropy = 2.0 * torch.rand(total, generator=random)
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
        proximal=between[own],
        keys=torch.arange(total)[own],
        reference=reference[own],
        entropy=entropy[own].clone().requires_grad_(),
    )


def _with_one(column: str, value: float) -> TokenBatch:
    """The fixed batch with this number at one token of a column."""
    tokens = token_batch()
    numbers = getattr(tokens, column).detach().clone()
    numbers[1] = value
    return replace(tokens, **{column: numbers.requires_grad_(column == "entropy")})


def on_ranks(
    batches: Sequence[TokenBatch], work: Callable[[int, TokenBatch, Any], Any]
) -> list[Any]:
    """What `work(rank, batch, gather)` returns on each of some ranks that gather in lockstep."""
    import numpy as np

    barrier = Barrier(len(batches))
    board: list[Sequence[float]] = [()] * len(batches)

    def run(rank: int) -> Any:
        def gather(own: Sequence[float]) -> Floats:
            board[rank] = own
            barrier.wait()
            rows = np.array(board, dtype=np.float64)
            barrier.wait()
            return rows

        try:
            return work(rank, batches[rank], gather)
        except BaseException:
            barrier.abort()  # the others would wait for ever
            raise

    with ThreadPoolExecutor(len(batches)) as pool:
        return [*pool.map(run, range(len(batches)))]


def _a_centre(objective: Objective) -> None:
    import torch

    from paceline.methods.parts.proximal import Between

    for num_updates in (1, 3):
        known = _Known(num_updates)
        found = objective.centre(known)
        for values in (found.share, found.logprobs) if isinstance(found, Between) else (found,):
            if values is not None:
                shape = tuple(values.shape)
                expect(shape == (sum(LENGTHS),), f"values of shape {shape}; one per token is due")
                expect(not values.requires_grad, "values with a gradient")
        if isinstance(found, Between):
            share = found.share[~found.share.isnan()]
            inside = bool(((share >= 0) & (share <= 1)).all())
            expect(inside, f"shares of {share.tolist()}; they are between 0 and 1")
        if found is not None:
            between = found.share if isinstance(found, Between) else None
            fixed = found.logprobs if isinstance(found, Between) else found
            batch = replace(token_batch(), proximal=fixed, between=between)
            expect(torch.isfinite(batch.old).all(), f"log-probs of {batch.old.tolist()}")


class _Known:
    """What is known of the tokens of `token_batch`; one version's weights are not kept."""

    def __init__(self, num_updates: int) -> None:
        import torch

        tokens = token_batch()
        self.behaviour = tokens.behaviour
        self.ages = torch.arange(len(tokens.behaviour)) % 4
        self.num_updates = num_updates

    def current(self) -> Tensor:
        return self.behaviour + 0.1

    def sampled(self) -> Tensor:
        return (self.behaviour + 0.01).masked_fill(self.ages == 3, float("nan"))

    def averaged(self) -> Tensor:
        return self.behaviour + 0.05


def _a_hook(objective: Objective) -> None:
    from paceline.methods.parts.whole_batch import WholeBatch, alone

    for apart in (0.1, -100.0, 100.0):

        def work(_: int, tokens: TokenBatch, gather: Any) -> tuple[float, dict[str, float]]:
            fixed = replace(tokens, logprobs=tokens.logprobs.detach())
            scale = objective.scale_step(WholeBatch(fixed, gather))
            return scale.factor, scale.log

        one = work(0, token_batch(apart=apart), alone)
        expect(math.isfinite(one[0]) and one[0] >= 0.0, f"a factor of {one[0]}")
        expect(all(map(math.isfinite, one[1].values())), f"numbers for the log: {one[1]}")
        for ranks in SPLITS:
            cuts = [round(rank * len(LENGTHS) / ranks) for rank in range(ranks + 1)]
            parts = [token_batch(first=a, last=b, apart=apart) for a, b in pairwise(cuts)]
            found = on_ranks(parts, work)
            expect(found == [one] * ranks, f"{ranks} ranks find {found}, one finds {one}")


def _plan(objective: Objective, tokens: TokenBatch, gather: Any = None) -> UpdatePlan:
    from paceline.methods.parts.whole_batch import WholeBatch, alone

    entropy = None if tokens.entropy is None else tokens.entropy.detach()
    fixed = replace(tokens, logprobs=tokens.logprobs.detach(), entropy=entropy)
    return objective.plan(WholeBatch(fixed, gather or alone))


def _checked(objective: Objective, batch: TokenBatch, plan: UpdatePlan) -> Loss:
    import torch

    loss = objective.loss(batch, plan, [_read(slot, batch) for slot in objective.logit_slots])
    expect(loss.value.ndim == 0, f"a loss of shape {tuple(loss.value.shape)}; one number is due")
    expect(torch.isfinite(loss.value), f"a loss of {loss.value}")
    batch.logprobs.grad = None
    loss.value.backward()  # pyright: ignore[reportUnknownMemberType]
    gradient = batch.logprobs.grad
    expect(gradient is not None, "no gradient reaches the log-probs")
    if gradient is not None:
        expect(torch.isfinite(gradient).all(), f"a gradient of {gradient.tolist()}")
    for name, value in {**loss.sums, **loss.maxima}.items():
        expect(value.ndim == 0 and torch.isfinite(value), f"{name} is {value}; one number is due")
    return loss


def _read(slot: Slot, batch: TokenBatch) -> Tensor:
    """What a slot finds in logits that follow the log-probs of the batch."""
    import torch

    from paceline.methods.parts.slots import LogitRows

    assert batch.keys is not None
    others = torch.tensor(OTHER_LOGITS).expand(len(batch.keys), -1)
    logits = torch.cat([batch.logprobs[:, None], others], 1)
    found = slot.on_logits(LogitRows(logits, torch.zeros_like(batch.keys), batch.keys, batch.step))
    expect(
        found.shape == batch.keys.shape,
        f"{tuple(found.shape)} from logits; one number per row {tuple(batch.keys.shape)} is due",
    )
    return found


def _adds_up(one: Loss, losses: list[Loss], whole: TokenBatch, parts: list[TokenBatch]) -> None:
    import torch

    at_once = float(one.value.detach())
    total = sum(float(each.value.detach()) for each in losses)
    expect(
        abs(total - at_once) < 1e-4,
        f"the loss is {at_once} at once and {total} in two micro-batches: divide by "
        "tokens.scale, not by what is in the micro-batch",
    )
    gradients = [part.logprobs.grad for part in parts]
    joined = torch.cat([each for each in gradients if each is not None])
    assert whole.logprobs.grad is not None
    same = torch.allclose(joined, whole.logprobs.grad, atol=1e-5)
    expect(same, "the gradient differs between one micro-batch and two")
    for name, value in one.sums.items():
        found = sum(float(each.sums[name].detach()) for each in losses)
        expect(abs(found - float(value.detach())) < 1e-3, f"sums[{name!r}] does not add up")


def _same_on_ranks(objective: Objective, whole: TokenBatch, ranks: int) -> None:
    """What is planned by several ranks leads to the gradient of one, to the last bit."""
    import torch

    _checked(objective, whole, _plan(objective, whole))
    assert whole.logprobs.grad is not None
    expected = whole.logprobs.grad.clone()
    cuts = [round(rank * len(LENGTHS) / ranks) for rank in range(ranks + 1)]
    parts = [token_batch(first=a, last=b) for a, b in pairwise(cuts)]

    def work(_: int, tokens: TokenBatch, gather: Any) -> Tensor:
        _checked(objective, tokens, _plan(objective, tokens, gather))
        assert tokens.logprobs.grad is not None
        return tokens.logprobs.grad

    found = torch.cat(on_ranks(parts, work))
    expect(
        torch.equal(found, expected),
        f"{ranks} ranks find another gradient than one: plan with the reductions of the batch",
    )
