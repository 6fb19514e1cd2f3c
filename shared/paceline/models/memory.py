"""How much memory a job needs, from its job file and the size of its model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.config import JobSpec
from paceline.models.weights import INDEX

_ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
_PROCESS = 300 << 20
"""Bytes of a process with torch and transformers, before it loads anything."""
_CONTEXT = 700 << 20
"""Bytes of a GPU that CUDA, its libraries and the gaps of the allocator take."""
_LIGHT = 800 << 20
"""Bytes of the services that compute nothing, on one machine."""
_HIDDEN_STATES = 17
"""Of the size of a token's hidden state, that a layer keeps for its backward pass."""
_LOGITS = 1 << 24
"""Logits that exist at once on a CPU; four float32 tensors of them in the backward pass."""
_CACHE = 2 << 30
"""`cache_bytes` of the engine `torch`, unless the job says otherwise."""
UNKNOWN_SIZE = (
    "the model's folder is not on this machine, or has no weights; config.json and "
    f"{INDEX} of the model in a folder are enough"
)
_MAX_JSON = 16 << 20
_VERSIONS = "versions served and kept for the mismatch check"


class MemoryPart(NamedTuple):
    """A part of what a process needs."""

    what: str
    num_bytes: int
    lower: str = ""
    """The field that lowers it, or the value to give it."""
    on_host: bool = False
    """Whether it stays in the machine's memory if the process computes on a GPU."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What of a model decides how much memory it needs."""

    parameters: int
    layers: int
    hidden: int
    token_bytes: int
    """Of keys and values, per token, with two bytes each."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What one process needs at most, in its own memory or that of its device."""

    process: str
    parts: tuple[MemoryPart, ...]

    @property
    def num_bytes(self) -> int:
        """All parts together."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def largest(self) -> tuple[MemoryPart, ...]:
        """Those that a field lowers, the largest first."""
        found = (part for part in self.parts if part.lower and part.num_bytes)
        return tuple(sorted(found, key=lambda part: -part.num_bytes))


def size_of(folder: Path) -> ModelSize | None:
    """The size of a model in Hugging Face layout; None: the folder does not tell it.

    `config.json` and the index of weight files are enough, before any weights are there.
    """
    try:
        config = _read(folder / "config.json")
        text = config.get("text_config") or config
        files = sum(each.stat().st_size for each in folder.glob("*.safetensors"))
        if (folder / INDEX).exists():
            files = max(files, int(_read(folder / INDEX)["metadata"]["total_size"]))
        heads = int(text["num_attention_heads"])
        layers, hidden = int(text["num_hidden_layers"]), int(text["hidden_size"])
        head = int(text.get("head_dim") or hidden // heads)
        pairs = int(text.get("num_key_value_heads") or heads)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        return None
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    parameters = files // _ITEM.get(stored, 4)
    if not parameters:
        return None
    return ModelSize(parameters, layers, hidden, token_bytes=4 * layers * pairs * head)


def _read(file: Path) -> Any:
    """The content of a JSON file of bounded size."""
    with file.open("rb") as opened:
        return json.loads(opened.read(_MAX_JSON))


def needs_of(spec: JobSpec, size: ModelSize) -> list[MemoryNeed]:
    """What a job needs on one machine: each trainer rank and rollout worker, and the rest.

    Precisions are decided (`with_dtype`). The first of `trainer.world_size` ranks serves versions
    for all; ranks are on a CPU. Engines other than `torch` are taken to need as much as that one.
    """
    rollout = MemoryNeed("a rollout worker", tuple(_rollout(spec, size)))
    trainer = _trainer(spec, size)
    rank = MemoryNeed("a further rank", tuple(p for p in trainer if p.what != _VERSIONS))
    return [
        MemoryNeed("the trainer", tuple(trainer)),
        *[rank] * (spec.trainer.world_size - 1),
        *[rollout] * spec.rollout.replicas,
        MemoryNeed("the other services", (MemoryPart("processes", _LIGHT),)),
    ]


def trainer_device_bytes(spec: JobSpec, size: ModelSize) -> int:
    """What a trainer rank needs at most of its GPU; precisions are decided."""
    parts = _trainer(spec, size)
    return _CONTEXT + sum(part.num_bytes for part in parts if not part.on_host)


def rollout_device_bytes(spec: JobSpec, size: ModelSize, *, gpus: int = 1) -> int:
    """What a rollout worker needs at most of each of its GPUs; precisions are decided.

    Its engine shares out weights, those of the next version, and keys and values.
    """
    weights = 2 * _ITEM.get(spec.model.dtype, 4) * size.parameters
    return _CONTEXT + (weights + _cache_bytes(spec, size)) // gpus


def _trainer(spec: JobSpec, size: ModelSize) -> list[MemoryPart]:
    trainer, world = spec.trainer, spec.trainer.world_size
    item, served = _ITEM.get(trainer.dtype, 4), _ITEM.get(spec.model.dtype, 4)
    version = served * size.parameters
    checked = spec.experience.max_staleness // trainer.publish_every + 2
    kept = min(checked * version, trainer.mismatch.bytes) if trainer.mismatch.sequences else 0
    tokens = trainer.tokens_per_micro_batch
    layers = 2 if trainer.gradient_checkpointing else size.layers
    states = item * size.hidden * (tokens * layers * _HIDDEN_STATES + tokens * size.layers)
    logits = 4 * _ITEM["float32"] * _LOGITS
    parts = [
        MemoryPart("process", _PROCESS, on_host=True),
        MemoryPart("activations", states + logits, "trainer.tokens_per_micro_batch"),
        MemoryPart(
            _VERSIONS,
            max(2 * version, kept),
            on_host=True,
        ),
    ]
    if trainer.lora is not None:
        return [*parts, MemoryPart("weights", item * size.parameters // world)]
    copies = item if item < _ITEM["float32"] and world == 1 else 0
    state = (16 + copies) * size.parameters // world
    return [*parts, MemoryPart("weights, gradients and AdamW", state, "trainer.lora")]


def _rollout(spec: JobSpec, size: ModelSize) -> list[MemoryPart]:
    item = _ITEM.get(spec.model.dtype, 4)
    # The torch engine uses the bytes of a version where they are, beside a packed copy.
    copies = 2 if spec.rollout.engine.options.get("packed", True) else 0
    return [
        MemoryPart("process", _PROCESS),
        MemoryPart(
            "packed weights, and those of the next version", copies * item * size.parameters
        ),
        MemoryPart("versions received", 2 * item * size.parameters),
        MemoryPart("keys and values", _cache_bytes(spec, size), "rollout.max_concurrent"),
    ]


def _cache_bytes(spec: JobSpec, size: ModelSize) -> int:
    """Keys and values of all requests that an engine has at once."""
    item = _ITEM.get(spec.model.dtype, 4)
    bound = int(spec.rollout.engine.options.get("cache_bytes", _CACHE))
    tokens = min(spec.rollout.max_concurrent, _open_episodes(spec)) * spec.sampling.max_context
    return min(tokens * size.token_bytes * item // 2, bound)


def _open_episodes(spec: JobSpec) -> int:
    """Episodes that can be sampled at once."""
    batch = spec.experience.batch_groups * spec.experience.group_size
    return (spec.experience.max_staleness + 1) * batch + sum(
        each.tasks for each in spec.eval_sets.values()
    )
