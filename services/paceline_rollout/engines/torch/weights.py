"""New weights of a model: prepared beside the serving ones, then exchanged at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.plugins import HeaderSpec, TensorSpec, WeightSnapshot
from paceline.weights.names import CheckpointNames, check_layout
from paceline_rollout.engines.torch.packed import Packed

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Forward = Callable[..., Any]


@dataclass(slots=True)
class Weights:
    """A snapshot as tensors of a model; after the exchange, the tensors that it replaced."""

    header: HeaderSpec
    values: list[tuple[Tensor, Tensor]]  # target, new value
    forwards: list[tuple[nn.Module, Forward]]
    packed: bool = True  # False: the exchange itself has to pack them

    def clear(self) -> None:
        """Free all memory, which may take a while."""
        self.values.clear()
        self.forwards.clear()


class ModelTensors:
    """The parameters and persistent buffers of a model, by name."""

    def __init__(self, model: nn.Module, packed: Packed | None, *, names: CheckpointNames) -> None:
        """`names` of the model's configuration."""
        persistent = model.state_dict().keys()
        named = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        self._tensors = {name: tensor for name, tensor in named if name in persistent}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        alone = [*model.named_parameters(), *model.named_buffers()]  # tied ones once
        self._required = frozenset(name for name, _ in alone if name in persistent)
        self._packed = packed
        self._names = names

    @torch.inference_mode()
    def prepare(self, snapshot: WeightSnapshot, *, pack: bool = True) -> Weights:
        """Bring a snapshot to the model's device while the model keeps serving.

        `pack`: packed layers are made now, beside those that serve. Otherwise the exchange replaces
        one after the other, which takes longer and half the memory: for a model that is idle.

        What is there already, and needs no conversion, is used as it is, as the bytes of a snapshot
        never change; it stays in memory as long as the model has it.

        May run in any thread, with as many torch threads as that one has.

        Raises:
            InvalidError: a tensor is unknown, has another shape, or is missing.
        """
        values: dict[int, tuple[Tensor, Tensor]] = {}
        for name, value in self._values(snapshot):
            target = self._tensors[name]
            if id(target) not in values:  # a tied one has several names
                values[id(target)] = target, value.to(target).contiguous()
        forwards: list[tuple[nn.Module, Forward]] = []
        if self._packed is not None and pack:
            forwards = list(self._packed.pack(lambda target: values[id(target)][1]))
        return Weights(snapshot.header, list(values.values()), forwards, pack)

    def exchange(self, weights: Weights) -> None:
        """Swap the model's tensors with those of `weights`, all of them or none.

        Only pointers move, unless layers are still to be packed. Call it between two steps, in the
        thread that computes.

        Raises:
            PacelineError: a tensor cannot be assigned; the old weights are restored.
        """
        values = [(target, target.data) for target, _ in weights.values]
        forwards = [(module, module.forward) for module, _ in weights.forwards]
        try:
            _assign(weights.values, weights.forwards if weights.packed else self._packs())
        except Exception as error:  # the supervisor boundary of an exchange
            _assign(values, forwards if weights.packed else self._packs())
            version = weights.header.version
            raise PacelineError(f"version {version} cannot be activated: {error}") from error
        weights.values, weights.forwards = values, forwards

    def _packs(self) -> Iterable[tuple[nn.Module, Forward]]:
        """Forward functions for the values that the model has, each made once the one before is."""
        return () if self._packed is None else self._packed.pack(lambda target: target.data)

    @torch.inference_mode()
    def unequal(self, snapshot: WeightSnapshot) -> list[str]:
        """The names of the model's tensors that a snapshot has otherwise."""
        return [
            name
            for name, value in self._values(snapshot)
            if not _same_bytes(self._tensors[name], value)
        ]

    def _values(self, snapshot: WeightSnapshot) -> Iterator[tuple[str, Tensor]]:
        """By name in memory, also names of tied tensors; those that are converted one by one."""
        in_memory = snapshot.header.names == "memory"
        sent = list(snapshot.tensors())
        check_layout(
            (entry for entry, _ in sent),
            snapshot.header.tied,
            shapes=self._shapes if in_memory else self._names.shapes,
            required=self._required if in_memory else self._names.required,
        )
        tensors = {entry.name: _tensor(entry, data) for entry, data in sent}
        tensors |= {name: tensors[same_as] for name, same_as in snapshot.header.tied}
        yield from tensors.items() if in_memory else self._names.all_to_memory(tensors)


def _tensor(entry: TensorSpec, data: memoryview) -> Tensor:
    return torch.frombuffer(data, dtype=DTYPES[entry.dtype]).view(entry.shape)


def _same_bytes(own: Tensor, sent: Tensor) -> bool:
    expected = sent.to(own.dtype)
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
