"""Checkpoint names: a model's tensors as files have them, and back into those in memory.

transformers keeps some tensors in memory otherwise than in a checkpoint: Qwen3-MoE has one
`mlp.experts.gate_up_proj` for the `gate_proj` and `up_proj` of all experts of a layer. Snapshots
have the names and shapes of `save_pretrained`, which every engine can load. Both directions are
transformers' own conversions, so that its table of model families is the only one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from paceline.errors import InvalidError, MisfitError
from paceline.plugins import TensorSpec
from paceline.weights.snapshot.manifest import ADAPTER_ENDS

Shape = tuple[int, ...]
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class Conversion:
    """Tensors that are converted together, by their names in memory and in a checkpoint."""

    memory: tuple[str, ...]
    checkpoint: tuple[str, ...]
    computed: bool  # values are moved, not only renamed


class CheckpointNames:
    """Converts the parameters and saved buffers of a model between memory and checkpoint."""

    def __init__(self, config: Any) -> None:
        """`config` is transformers' configuration of the model; no weights are allocated.

        Raises:
            InvalidError: transformers' conversions of this family do not reverse each other.
        """
        config = deepcopy(config)  # `from_config` writes the attention into it
        with torch.device("meta"):
            self._model: Any = AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", trust_remote_code=False
            )
        self._model.tie_weights()
        every = get_model_conversion_mapping(self._model, add_legacy=False)
        transforms: list[Any] = [one for one in every if not isinstance(one, PrefixChange)]
        # Where transformers itself keeps them; without them it would look them up in each call.
        self._model._weight_conversions = transforms or None
        self._renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        self._converters = [one for one in transforms if isinstance(one, WeightConverter)]
        self._memory: dict[str, Tensor] = dict(self._model.state_dict())
        checkpoint = self._revert(self._memory)
        self.shapes: dict[str, Shape] = {n: tuple(t.shape) for n, t in checkpoint.items()}
        """Of every tensor in a checkpoint; tied ones have several names."""
        self.conversions = self._conversions(checkpoint)
        self._by_memory = {name: one for one in self.conversions for name in one.memory}

    @property
    def required(self) -> frozenset[str]:
        """Checkpoint names of all tensors, tied ones once."""
        parameters = {name for name, _ in self._model.named_parameters()}
        every = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        repeated = every - parameters
        return frozenset(
            name
            for conversion in self.conversions
            if not repeated.issuperset(conversion.memory)
            for name in conversion.checkpoint
        )

    def of(self, name: str) -> Conversion:
        """The conversion that a tensor in memory, or an adapter that `takes` it, is part of.

        Raises:
            InvalidError: the model has no such tensor.
        """
        end = next((end for end in ADAPTER_ENDS if name.endswith(end)), None)
        if end is not None:
            (weight,) = self.of(name.removesuffix(end) + _WEIGHT).checkpoint
            return Conversion((name,), (weight.removesuffix(_WEIGHT) + end,), computed=False)
        if name not in self._by_memory:
            raise InvalidError(f"tensor {name!r} is unknown to this model")
        return self._by_memory[name]

    def takes(self, adapter: str) -> bool:
        """Whether a checkpoint has the weight of an adapter as it is in memory."""
        stem = next(adapter.removesuffix(end) for end in ADAPTER_ENDS if adapter.endswith(end))
        return not self.of(stem + _WEIGHT).computed

    def tied(self, pairs: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        """Pairs of names in memory as pairs of checkpoint names."""
        return tuple(
            pair
            for name, same_as in pairs
            for pair in zip(self.of(name).checkpoint, self.of(same_as).checkpoint, strict=True)
        )

    def to_checkpoint(
        self, conversion: Conversion, tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The tensors of a conversion as a checkpoint has them, in its order, contiguous."""
        if not conversion.computed:
            names = zip(conversion.memory, conversion.checkpoint, strict=True)
            return {renamed: tensors[name] for name, renamed in names}
        reverted = self._revert({name: tensors[name] for name in conversion.memory})
        return {name: reverted[name].contiguous() for name in conversion.checkpoint}

    def to_memory(self, conversion: Conversion, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a conversion as the model has them; may share memory with `tensors`."""
        if not conversion.computed:
            names = zip(conversion.memory, conversion.checkpoint, strict=True)
            return {name: tensors[renamed] for name, renamed in names}
        return self._convert({name: tensors[name] for name in conversion.checkpoint})

    def all_to_memory(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Those of a checkpoint as the model has them, without tied ones that it omits.

        What is converted takes memory of its own, one conversion after the other.
        """
        for conversion in self.conversions:
            if all(name in tensors for name in conversion.checkpoint):
                yield from self.to_memory(conversion, tensors).items()

    def _conversions(self, checkpoint: Mapping[str, Tensor]) -> tuple[Conversion, ...]:
        """The smallest sets of tensors that can be converted alone, in the model's order."""
        sources: dict[str, list[str]] = {}  # of a tensor in memory, or of the first of several
        computed: set[str] = set()
        for name in checkpoint:
            target, pattern = self._renamed(name)
            sources.setdefault(target, []).append(name)
            if pattern is not None:
                computed.add(target)
        conversions: dict[str, Conversion] = {}
        for target, names in sources.items():
            if target not in computed:
                self._refuse_odd(names[1:])
                conversion = Conversion((target,), tuple(names), computed=False)
            else:
                conversion = self._checked({name: checkpoint[name] for name in names})
            conversions |= dict.fromkeys(conversion.memory, conversion)
        self._refuse_odd(self._memory.keys() ^ conversions.keys())
        return tuple(dict.fromkeys(conversions[name] for name in self._memory))

    def _checked(self, tensors: Mapping[str, Tensor]) -> Conversion:
        """The conversion of some tensors of a checkpoint, which has to give them back."""
        memory = self._convert(tensors)
        back = self._revert(memory)
        shapes = {(name, value.shape) for name, value in tensors.items()}
        self._refuse_odd({name for name, _ in shapes ^ {(n, v.shape) for n, v in back.items()}})
        return Conversion(tuple(memory), tuple(back), computed=True)

    def _refuse_odd(self, names: Collection[str]) -> None:
        if names:
            raise InvalidError(
                f"model type {self._model.config.model_type!r}: tensor {min(names)!r} cannot be "
                "converted to a checkpoint and back; another version of transformers may"
            )

    def _revert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(revert_weight_conversion(self._model, dict(tensors)))

    def _renamed(self, name: str) -> tuple[str, str | None]:
        """The first tensor in memory that one of a checkpoint goes into, and how."""
        renamed, pattern = rename_source_key(name, self._renamings, self._converters)
        if renamed not in self._memory and name in self._memory:
            return name, None
        return renamed, pattern

    def _convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What `from_pretrained` does with the tensors of files."""
        by_pattern = {p: each for each in self._converters for p in each.source_patterns}
        work: dict[str, Any] = {}
        for name in sorted(tensors, key=dot_natural_key):
            target, pattern = self._renamed(name)
            if pattern is None:
                raise InvalidError(f"tensor {name!r} is not converted")
            if target not in work:
                work[target] = deepcopy(by_pattern[pattern])  # it collects its tensors
            work[target].add_tensor(target, name, pattern, tensors[name])
        memory: dict[str, Tensor] = {}
        for target, converter in work.items():
            values = converter.convert(target, model=self._model, config=self._model.config)
            memory |= {n: v[0] if isinstance(v, list) else v for n, v in values.items()}
        return memory


def check_layout(
    entries: Iterable[TensorSpec],
    tied: Iterable[tuple[str, str]],
    *,
    shapes: Mapping[str, Shape],
    required: Collection[str],
) -> None:
    """Check names and shapes of a snapshot against those of a model.

    Raises:
        MisfitError: a tensor is unknown, has another shape, or is missing.
    """
    sent = {entry.name: tuple(entry.shape) for entry in entries}
    pairs = dict(tied)
    _refuse([name for name in (*sent, *pairs) if name not in shapes], "is unknown to this model")
    for name, shape in sent.items():
        if shape != shapes[name]:
            raise MisfitError(
                f"snapshot: tensor {name!r} has shape {shape}; allowed: {shapes[name]}"
            )
    sources = set(pairs.values())
    _refuse(sorted((set(required) - pairs.keys() | sources) - sent.keys()), "is missing")
    unlike = [name for name, same_as in pairs.items() if shapes[name] != sent[same_as]]
    _refuse(unlike, "has another shape than the one that it is tied to")


def _refuse(names: Sequence[str], why: str) -> None:
    if names:
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise MisfitError(f"snapshot: tensor {names[0]!r} {why}{more}")
