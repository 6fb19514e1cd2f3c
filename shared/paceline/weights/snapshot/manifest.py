"""The layout of a snapshot: its header and tensors, to and from protobuf."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.errors import IntegrityError, InvalidError
from paceline.plugins import NameKind
from paceline.v1 import weights_pb2 as pb
from paceline.weights.canary import NO_CANARY, Canary, CanarySequence
from paceline.weights.cost import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, best_num_chunks

ALIGNMENT = 64
MAX_CHUNKS = 1 << 20
ADAPTER_ENDS = (".lora_A.weight", ".lora_B.weight")
"""Of the names of a LoRA adapter's tensors, see `paceline.weights.adapters`."""

# Trainers of the previous release do not send the kind.
_NAMES: dict[str, NameKind] = {"": "memory", "checkpoint": "checkpoint"}

ITEM_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: bytes `[offset, offset + num_bytes)` of the snapshot."""

    name: str
    dtype: str  # torch name without prefix
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """Identity, tensors and chunking of a snapshot; sent before the first chunk."""

    job_id: str
    version: int
    step: int
    parent_version: int
    base_version: int  # -1: full snapshot
    incarnation: int
    num_bytes: int
    chunk_bytes: int
    tensors: tuple[TensorEntry, ...]
    tied: tuple[tuple[str, str], ...] = ()  # (name, same_as)
    canary: Canary = NO_CANARY
    frozen_bytes: int = 0  # the first bytes, which are the same in all versions of the job
    names: NameKind = "memory"  # of tensors
    config_json: str = ""  # `model_config.canonical` of the trainer's config.json
    # As it came, because the digest of its sender covers fields of other releases too.
    received: bytes = field(default=b"", compare=False, repr=False)

    @property
    def canary_tokens(self) -> tuple[int, ...]:
        """Empty: for engines that ask, as they did before headers had `canary`."""
        return ()

    @property
    def canary_logprobs(self) -> tuple[float, ...]:
        """Empty, as `canary_tokens`."""
        return ()

    @property
    def num_chunks(self) -> int:
        """Number of chunks; the last one may be short."""
        return -(-self.num_bytes // self.chunk_bytes)

    @property
    def has_adapters(self) -> bool:
        """Whether tensors are adapters, which have to be merged into the weights."""
        return any(entry.name.endswith(ADAPTER_ENDS) for entry in self.tensors)

    def chunk_range(self, index: int) -> tuple[int, int]:
        """First and past-the-last byte of a chunk."""
        start = index * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.num_bytes)

    def is_frozen(self, index: int) -> bool:
        """Whether a chunk has the same bytes in all versions of the job."""
        return self.chunk_range(index)[1] <= self.frozen_bytes

    def same_layout(self, other: SnapshotHeader) -> bool:
        """Whether all tensors have the same offsets; the chunk sizes may differ."""
        return (self.num_bytes, self.tensors) == (other.num_bytes, other.tensors)


def plan(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]],
) -> tuple[tuple[TensorEntry, ...], int]:
    """Lay out tensors, given as (name, dtype, shape), in order: entries and total bytes."""
    entries: list[TensorEntry] = []
    end = 0
    for name, dtype, shape in tensors:
        if dtype not in ITEM_BYTES:
            raise InvalidError(f"{name}: dtype {dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
        entries.append(TensorEntry(name, dtype, tuple(shape), offset, num_bytes))
        end = offset + num_bytes
    return tuple(entries), end


def choose_chunk_bytes(
    num_bytes: int, *, receivers: int = 4, bytes_per_s: float = 1e9, setup_s: float = 2e-4
) -> int:
    """The chunk size that minimizes the predicted time of a chain, 256 KiB to 8 MiB."""
    best = best_num_chunks(
        max(receivers, 2), num_bytes=num_bytes, bytes_per_s=bytes_per_s, start_s=setup_s
    )
    size = math.ceil(num_bytes / best / ALIGNMENT) * ALIGNMENT
    return min(max(size, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)


def header_to_proto(header: SnapshotHeader) -> pb.SnapshotHeader:
    """The header as a message, without its authentication tag."""
    if header.received:
        return pb.SnapshotHeader.FromString(header.received)
    return pb.SnapshotHeader(
        job_id=header.job_id,
        version=header.version,
        step=header.step,
        parent_version=header.parent_version,
        base_version=header.base_version,
        incarnation=header.incarnation,
        num_bytes=header.num_bytes,
        chunk_bytes=header.chunk_bytes,
        num_chunks=header.num_chunks,
        tensors=[
            pb.TensorEntry(
                name=t.name, dtype=t.dtype, shape=t.shape, offset=t.offset, num_bytes=t.num_bytes
            )
            for t in header.tensors
        ],
        tied=[pb.TiedTensor(name=name, same_as=same_as) for name, same_as in header.tied],
        canary=_canary_to_proto(header.canary),
        frozen_bytes=header.frozen_bytes,
        names="" if header.names == "memory" else header.names,
        config_json=header.config_json,
    )


def header_from_proto(message: pb.SnapshotHeader) -> SnapshotHeader:
    """The header of a message. Raises `IntegrityError` if it is inconsistent."""
    if not 0 < message.chunk_bytes <= MAX_CHUNK_BYTES or not (
        0 <= message.num_bytes <= MAX_CHUNKS * message.chunk_bytes
    ):
        raise IntegrityError(
            f"weights: header says {message.num_bytes} bytes in chunks of {message.chunk_bytes}:"
            f" the limit is {MAX_CHUNKS} chunks of 1 to {MAX_CHUNK_BYTES} bytes"
        )
    if message.names not in _NAMES:
        raise IntegrityError(
            f"weights: header says that tensors have {message.names!r} names; "
            f"allowed: {', '.join(filter(None, _NAMES))}"
        )
    body = pb.SnapshotHeader()
    body.CopyFrom(message)
    body.ClearField("authentication")
    header = SnapshotHeader(
        job_id=message.job_id,
        version=message.version,
        step=message.step,
        parent_version=message.parent_version,
        base_version=message.base_version,
        incarnation=message.incarnation,
        num_bytes=message.num_bytes,
        chunk_bytes=message.chunk_bytes,
        tensors=tuple(_entry_from(entry, message.num_bytes) for entry in message.tensors),
        tied=tuple((pair.name, pair.same_as) for pair in message.tied),
        canary=_canary_from_proto(message.canary),
        frozen_bytes=message.frozen_bytes,
        names=_NAMES[message.names],
        config_json=message.config_json,
        received=body.SerializeToString(deterministic=True),
    )
    if header.num_chunks != message.num_chunks:
        raise IntegrityError(
            f"weights: header says {message.num_chunks} chunks; its sizes give {header.num_chunks}"
        )
    return header


def _canary_to_proto(canary: Canary) -> pb.Canary:
    return pb.Canary(
        sequences=[
            pb.CanarySequence(tokens=s.tokens, logprobs=s.logprobs) for s in canary.sequences
        ],
        noise=canary.noise,
        recipe=canary.recipe,
    )


def _canary_from_proto(message: pb.Canary) -> Canary:
    sequences = [CanarySequence(tuple(s.tokens), tuple(s.logprobs)) for s in message.sequences]
    canary = Canary(tuple(sequences), message.noise, message.recipe)
    canary.check()
    return canary


def _entry_from(message: pb.TensorEntry, total: int) -> TensorEntry:
    shape = tuple(message.shape)
    size = math.prod(shape) * ITEM_BYTES.get(message.dtype, 0)
    fits = message.offset >= 0 and message.offset + message.num_bytes <= total
    known = message.dtype in ITEM_BYTES and min(shape, default=0) >= 0
    if not known or size != message.num_bytes or not fits:
        raise IntegrityError(f"weights: header has an invalid entry for tensor {message.name!r}")
    return TensorEntry(message.name, message.dtype, shape, message.offset, message.num_bytes)
