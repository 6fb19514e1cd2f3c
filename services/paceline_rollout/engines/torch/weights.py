"""New weights of a model: made beside those that serve, then put in their place at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import InvalidError, PacelineError
from paceline_rollout.engines.base import Header, Snapshot
from paceline_rollout.engines.torch.packed import Packed

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Forward = Callable[..., Any]


@dataclass(slots=True)
class Weights:
    """A snapshot as tensors of a model; once exchanged, those that it replaced."""

    header: Header
    values: list[tuple[Tensor, Tensor]]  # place, what is to be there
    forwards: list[tuple[nn.Module, Forward]]

    def clear(self) -> None:
        """Let go of all memory, which takes its time."""
        self.values.clear()
        self.forwards.clear()


class Places:
    """The parameters and buffers of a model that snapshots fill, by name."""

    def __init__(self, model: nn.Module, packed: Packed | None) -> None:
        kept = model.state_dict().keys()
        named = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        self._places = {name: tensor for name, tensor in named if name in kept}
        self._needed = {id(tensor): name for name, tensor in model.named_parameters()}
        self._packed = packed

    @torch.inference_mode()
    def prepare(self, snapshot: Snapshot) -> Weights:
        """Copy a snapshot to where the model computes; it goes on serving what it has.

        May run in any thread, by as many threads of torch as that one has.

        Raises:
            InvalidError: a tensor has no place here, another shape, or is missing.
        """
        found = [
            (self._place(entry.name, entry.shape), entry, data)
            for entry, data in snapshot.tensors()
        ]
        tied = [
            (self._place(name, self._get(same).shape), self._get(same))
            for name, same in snapshot.header.tied
        ]
        brought = {id(place) for place, *_ in found}
        self._check_complete(brought | {id(place) for place, same in tied if id(same) in brought})
        values: dict[int, tuple[Tensor, Tensor]] = {}
        for place, entry, data in found:
            flat = torch.frombuffer(data, dtype=DTYPES[entry.dtype])
            values[id(place)] = place, torch.empty_like(place).copy_(flat.view(entry.shape))
        for place, same in tied:
            values[id(place)] = place, values[id(same)][1]
        forwards: list[tuple[nn.Module, Forward]] = []
        if self._packed is not None:
            forwards = self._packed.pack(lambda place: values[id(place)][1])
        return Weights(snapshot.header, list(values.values()), forwards)

    def exchange(self, weights: Weights) -> None:
        """Put weights in their places and what was there into `weights`: all of it or nothing.

        Only pointers move. Between two steps, in the thread that computes. Raises `PacelineError`
        when something cannot be put in its place.
        """
        values = [(place, place.data) for place, _ in weights.values]
        forwards = [(module, module.forward) for module, _ in weights.forwards]
        try:
            _put(weights.values, weights.forwards)
        except Exception as error:
            _put(values, forwards)
            version = weights.header.version
            raise PacelineError(f"version {version} cannot be put in place: {error}") from error
        weights.values, weights.forwards = values, forwards

    def _get(self, name: str) -> Tensor:
        if name not in self._places:
            raise InvalidError(f"snapshot: tensor {name!r} is unknown to this model")
        return self._places[name]

    def _place(self, name: str, shape: Iterable[int]) -> Tensor:
        place = self._get(name)
        if tuple(place.shape) != tuple(shape):
            wanted = tuple(place.shape)
            raise InvalidError(
                f"snapshot: tensor {name!r} has shape {tuple(shape)}; allowed: {wanted}"
            )
        return place

    def _check_complete(self, covered: Collection[int]) -> None:
        missing = [name for place, name in self._needed.items() if place not in covered]
        if missing:
            raise InvalidError(f"snapshot: tensor {missing[0]!r} is missing")


def _put(
    values: Iterable[tuple[Tensor, Tensor]], forwards: Iterable[tuple[nn.Module, Forward]]
) -> None:
    for place, value in values:
        place.data = value
    for module, forward in forwards:
        module.forward = forward
