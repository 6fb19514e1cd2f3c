"""Runs the modules of the policy in any precision, with the weights of one layer in memory.

The canary's log-probs come from here: from the policy's own parameters, by nothing that publishing
uses (its names, its merged adapters, its staging), so that a fault there cannot agree with itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from paceline.models.families import cache_argument
from paceline_trainer.step.model import PolicyModel, decoder_layers

Weights = tuple[Tensor, ...]
"""The policy's parameters and saved buffers, in the order of its modules."""


class _Slot(NamedTuple):
    """A module without weights that lacks one here, and which of them."""

    module: nn.Module
    name: str
    blank: Any
    position: int

    def put(self, value: Any) -> None:
        """Give the module a tensor."""
        own = isinstance(self.blank, nn.Parameter) and not isinstance(value, nn.Parameter)
        setattr(self.module, self.name, nn.Parameter(value, requires_grad=False) if own else value)


class LayerwisePolicy:
    """The policy's modules without its weights. Collective where the policy is sharded.

    For a policy that is whole, another thread may run it with captured weights.
    """

    def __init__(self, policy: PolicyModel, device: torch.device) -> None:
        self._policy = policy
        self._device = device
        self._model = policy.structure
        self._weights: Weights = ()
        self._convert: Callable[[Tensor], Tensor] = Tensor.float
        self._sources: list[tuple[nn.Module, str]] = []  # of the weights
        self._unsaved: list[tuple[nn.Module, nn.Module, str]] = []  # buffers of both models
        places = self._places()
        self._layers = [
            (layer, [place for module in layer.modules() for place in places[id(module)]])
            for layer in decoder_layers(self._model.inner)
        ]
        inside = {place.position for _, own in self._layers for place in own}
        everywhere = [place for own in places.values() for place in own]
        self._rest = [place for place in everywhere if place.position not in inside]

    @torch.no_grad()
    def capture(self) -> Weights:
        """The policy's tensors, without a copy; those that are trained in float32."""
        seen: dict[int, Tensor] = {}  # tied ones stay one
        with self._policy.in_float32():
            values: list[Tensor] = [getattr(module, name) for module, name in self._sources]
        return tuple(seen.setdefault(id(value), value.detach()) for value in values)

    @torch.no_grad()
    def logprobs(
        self, weights: Weights, ids: Tensor, *, stored: torch.dtype, dtype: torch.dtype
    ) -> Tensor:
        """Log-probs [S, L - 1] of the tokens after the first of `ids` [S, L].

        Computed in `dtype`, from weights rounded to `stored`.
        """
        ids = ids.to(self._device)
        targets = ids[:, 1:].reshape(-1)
        indices = torch.arange(len(targets), device=self._device)
        with self._given(weights, lambda value: value.to(stored).to(dtype)):
            found = self._model(ids[:, :-1], None, indices, targets, 1.0).logprobs
        return found.view(len(ids), -1)

    def whole_bytes(self, weights: Weights, dtype: torch.dtype) -> int:
        """Size in bytes of what `whole` gathers; 0: nothing is sharded."""
        sharded = {id(value): value for value in weights if isinstance(value, DTensor)}
        return sum(value.numel() * dtype.itemsize for value in sharded.values())

    @torch.no_grad()
    def whole(self, weights: Weights, dtype: torch.dtype) -> Weights:
        """Gather the sharded weights, in this precision, so that no later pass has to."""
        seen: dict[int, Tensor] = {}  # tied ones stay one
        for value in weights:
            if id(value) not in seen:
                sharded = isinstance(value, DTensor)
                seen[id(value)] = value.full_tensor().to(self._device, dtype) if sharded else value
        return tuple(seen[id(value)] for value in weights)

    @torch.no_grad()
    def extend(
        self, weights: Weights, ids: Tensor, length: int, choose: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Append tokens to `ids` [S, L] up to `length`: those [S] that it chooses by logits [S, V].

        Computed in the precision of the weights.
        """
        dtype = next(value.dtype for value in weights if value.is_floating_point())
        inner: Any = self._model.inner
        past: Any = None
        # Families with other states than keys and values read everything again for each token.
        caches = not getattr(inner, "_is_stateful", False)
        cache = cache_argument(inner)
        with self._given(weights, lambda value: value.to(dtype)):
            while ids.shape[1] < length:
                fed = ids if past is None else ids[:, -1:]
                held = {} if past is None else {cache: past}
                out = inner(input_ids=fed.to(self._device), use_cache=caches, **held)
                past = getattr(out, cache) if caches else None
                ids = torch.cat([ids, choose(out.logits[:, -1].float().cpu())[:, None]], 1)
        return ids

    def _places(self) -> dict[int, list[_Slot]]:
        """What each module of the copy lacks, by its id."""
        places: dict[int, list[_Slot]] = {}
        saved = self._policy.inner.state_dict().keys()
        pairs = zip(self._policy.inner.named_modules(), self._model.inner.modules(), strict=True)
        for (path, theirs), mine in pairs:
            own = places.setdefault(id(mine), [])
            for name in [name for name, _ in theirs.named_parameters(recurse=False)]:
                own.append(_Slot(mine, name, getattr(mine, name), len(self._sources)))
                self._sources.append((theirs, name))
            for name in [name for name, _ in theirs.named_buffers(recurse=False)]:
                if (f"{path}.{name}" if path else name) in saved:
                    own.append(_Slot(mine, name, getattr(mine, name), len(self._sources)))
                    self._sources.append((theirs, name))
                else:
                    self._unsaved.append((mine, theirs, name))
        return places

    @contextmanager
    def _given(self, weights: Weights, convert: Callable[[Tensor], Tensor]) -> Generator[None]:
        self._weights, self._convert = weights, convert
        for mine, theirs, name in self._unsaved:  # they are on another device by now
            setattr(mine, name, getattr(theirs, name))
        self._fill(self._rest)
        hooks: list[RemovableHandle] = []
        for layer, own in self._layers:
            hooks.append(layer.register_forward_pre_hook(_calling(partial(self._fill, own))))
            empty = _calling(partial(_empty, own))
            hooks.append(layer.register_forward_hook(empty, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            _empty(self._rest)
            self._weights = ()

    def _fill(self, places: Sequence[_Slot]) -> None:
        filled: dict[int, Tensor] = {}
        for place in places:
            value = self._weights[place.position]
            if id(value) not in filled:
                filled[id(value)] = self._whole(value)
            place.put(filled[id(value)])

    def _whole(self, value: Tensor) -> Tensor:
        full = value.full_tensor() if isinstance(value, DTensor) else value
        full = full.to(self._device)
        return self._convert(full) if full.is_floating_point() else full


def _empty(places: Sequence[_Slot]) -> None:
    for place in places:
        place.put(place.blank)


def _calling(work: Callable[[], None]) -> Callable[..., None]:
    """A hook of a module that only calls this."""
    return lambda *_: work()
