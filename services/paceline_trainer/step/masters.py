"""Mixed precision of a single rank: float32 weights that are trained, and copies that compute.

As FSDP's `MixedPrecisionPolicy(param_dtype=…, reduce_dtype=float32)`, which several ranks use, but
weights are converted once per update, not for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a module has a parameter; tied ones are in several places."""

    module: nn.Module
    name: str
    copy: nn.Parameter
    master: nn.Parameter


class MasterWeights:
    """The float32 weights of those parameters of a model that are trained.

    The model has copies in `dtype`, whose gradients are added up in float32. What is frozen exists
    in `dtype` only.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._places: list[_Place] = []
        self._copies: dict[int, nn.Parameter] = {}  # by the id of the master
        self._lent = False

    @torch.no_grad()
    def adopt(self, module: nn.Module) -> None:
        """Replace the parameters of a module and its children by copies, unless they are that."""
        copies = {id(each) for each in self._copies.values()}
        for owner in module.modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                if id(parameter) in copies or not parameter.is_floating_point():
                    continue
                if not parameter.requires_grad:
                    parameter.data = parameter.data.to(self._dtype)
                    continue
                copy = self._copy_of(parameter)
                copies.add(id(copy))
                owner.register_parameter(name, copy)
                self._places.append(_Place(owner, name, copy, parameter))

    @contextmanager
    def restored(self) -> Generator[None]:
        """The model with its float32 weights, for whoever reads or loads its state."""
        for place in self._places:
            place.module.register_parameter(place.name, place.master)
        try:
            yield
        finally:
            for place in self._places:
                place.module.register_parameter(place.name, place.copy)

    @torch.no_grad()
    def copy(self) -> None:
        """Convert the float32 weights after they have changed."""
        done = set[int]()
        for place in self._places:
            if id(place.copy) in done:  # tied
                continue
            done.add(id(place.copy))
            if self._lent:
                place.copy.data = place.master.detach().to(self._dtype)
            else:
                place.copy.copy_(place.master)
        self._lent = False

    def borrow(self, copies: Sequence[Tensor], values: Sequence[Tensor]) -> bool:
        """Let copies be others with the same values, which nobody writes to, until `copy`.

        Returns whether these have their form; `copies` are those of this object.
        """
        pairs = list(zip(copies, values, strict=True))
        if not all(_alike(own, other) for own, other in pairs):
            return False
        for own, other in pairs:
            own.data = other
        self._lent = True
        return True

    def _copy_of(self, master: nn.Parameter) -> nn.Parameter:
        found = self._copies.get(id(master))
        if found is None:
            found = self._copies[id(master)] = nn.Parameter(master.detach().to(self._dtype))
            found.register_post_accumulate_grad_hook(_add_to(master))
        return found


def _alike(own: Tensor, other: Tensor) -> bool:
    same = own.dtype == other.dtype and own.device == other.device and own.shape == other.shape
    return same and other.is_contiguous()


def _add_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    """A hook that moves the gradient of a copy to its master."""

    @torch.no_grad()
    def add(copy: Tensor) -> None:
        gradient, copy.grad = copy.grad, None
        if gradient is None:
            return
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad.add_(gradient)

    return add
