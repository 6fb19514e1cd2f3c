"""New weights of a model: prepared beside the serving ones, then exchanged at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import InvalidError, PacelineError
from paceline.plugins import HeaderSpec, WeightSnapshot
from paceline_rollout.engines.torch.packed import Packed

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Forward = Callable[..., Any]


@dataclass(slots=True)
class Weights:
    """A snapshot as tensors of a model; after the exchange, the tensors that it replaced."""

    header: HeaderSpec
    values: list[tuple[Tensor, Tensor]]  # target, new value
    forwards: list[tuple[nn.Module, Forward]]

    def clear(self) -> None:
        """Free all memory, which may take a while."""
        self.values.clear()
        self.forwards.clear()


class ModelTensors:
    """The parameters and persistent buffers of a model, by name."""

    def __init__(self, model: nn.Module, packed: Packed | None) -> None:
        persistent = model.state_dict().keys()
        named = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        self._tensors = {name: tensor for name, tensor in named if name in persistent}
        self._required = {id(tensor): name for name, tensor in model.named_parameters()}
        self._packed = packed

    @torch.inference_mode()
    def prepare(self, snapshot: WeightSnapshot) -> Weights:
        """Copy a snapshot to the model's device while the model keeps serving.

        May run in any thread, with as many torch threads as that one has.

        Raises:
            InvalidError: a tensor is unknown, has another shape, or is missing.
        """
        found = [
            (self._target(entry.name, entry.shape), entry, data)
            for entry, data in snapshot.tensors()
        ]
        tied = [
            (self._target(name, self._get(source).shape), self._get(source))
            for name, source in snapshot.header.tied
        ]
        provided = {id(target) for target, *_ in found}
        self._check_complete(
            provided | {id(target) for target, source in tied if id(source) in provided}
        )
        values: dict[int, tuple[Tensor, Tensor]] = {}
        for target, entry, data in found:
            flat = torch.frombuffer(data, dtype=DTYPES[entry.dtype])
            values[id(target)] = target, torch.empty_like(target).copy_(flat.view(entry.shape))
        for target, source in tied:
            values[id(target)] = target, values[id(source)][1]
        forwards: list[tuple[nn.Module, Forward]] = []
        if self._packed is not None:
            forwards = self._packed.pack(lambda target: values[id(target)][1])
        return Weights(snapshot.header, list(values.values()), forwards)

    def exchange(self, weights: Weights) -> None:
        """Swap the model's tensors with those of `weights`, all of them or none.

        Only pointers move. Call it between two steps, in the thread that computes.

        Raises:
            PacelineError: a tensor cannot be assigned; the old weights are restored.
        """
        values = [(target, target.data) for target, _ in weights.values]
        forwards = [(module, module.forward) for module, _ in weights.forwards]
        try:
            _assign(weights.values, weights.forwards)
        except Exception as error:
            _assign(values, forwards)
            version = weights.header.version
            raise PacelineError(f"version {version} cannot be activated: {error}") from error
        weights.values, weights.forwards = values, forwards

    @torch.inference_mode()
    def unequal(self, snapshot: WeightSnapshot) -> list[str]:
        """The names of tensors of a snapshot that the model has otherwise."""
        return [
            entry.name
            for entry, data in snapshot.tensors()
            if not _same_bytes(self._target(entry.name, entry.shape), entry.dtype, data)
        ]

    def _get(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise InvalidError(f"snapshot: tensor {name!r} is unknown to this model")
        return self._tensors[name]

    def _target(self, name: str, shape: Iterable[int]) -> Tensor:
        target = self._get(name)
        if tuple(target.shape) != tuple(shape):
            expected = tuple(target.shape)
            raise InvalidError(
                f"snapshot: tensor {name!r} has shape {tuple(shape)}; allowed: {expected}"
            )
        return target

    def _check_complete(self, covered: Collection[int]) -> None:
        missing = [name for target, name in self._required.items() if target not in covered]
        if missing:
            raise InvalidError(f"snapshot: tensor {missing[0]!r} is missing")


def _same_bytes(own: Tensor, dtype: str, data: memoryview) -> bool:
    expected = torch.frombuffer(data, dtype=DTYPES[dtype]).to(own.dtype).view(own.shape)
    # As integers, because NaN is not equal to itself.
    own_bytes = own.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return torch.equal(own_bytes, expected.contiguous().view(-1).view(torch.uint8))


def _assign(
    values: Iterable[tuple[Tensor, Tensor]], forwards: Iterable[tuple[nn.Module, Forward]]
) -> None:
    for target, value in values:
        target.data = value
    for module, forward in forwards:
        module.forward = forward
