"""What is in the files of a checkpoint: safetensors from each rank, and an index in JSON.

torch plans who writes and reads what, whatever the world size. Its own writer and reader pickle, so
that whoever can write to the storage could run code in a trainer; nothing here does.
"""

from __future__ import annotations

import io
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from paceline.errors import IntegrityError, StateError
from paceline_trainer.checkpoints.digests import FileDigest
from paceline_trainer.checkpoints.storage import Storage

INDEX = "index.json"
# As safetensors names them.
_DTYPES = {
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_FILE = re.compile(r"rank-[0-9]{5,}\.safetensors")
_ALIGNMENT = 8  # of the first tensor in a file


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk of a tensor is; a value is the bytes of its JSON."""

    file: str
    start: int
    num_bytes: int
    dtype: torch.dtype
    sizes: tuple[int, ...]


Places = Mapping[MetadataIndex, Place]


def file_of(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


class SaveAsJson(DefaultSavePlanner):
    """What is no tensor is written as JSON."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """The tensor, or the JSON of a value; raises `StateError` for any other object."""
        if write_item.type is not WriteItemType.BYTE_IO:
            return super().transform_object(write_item, object)
        return io.BytesIO(json.dumps(_to_json(object, write_item.index.fqn)).encode())


class LoadFromJson(DefaultLoadPlanner):
    """Reads what `SaveAsJson` has written."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value where it belongs."""
        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, _from_json(json.loads(value.getvalue())))


class CheckpointWriter(StorageWriter):
    """Writes the part of one rank; the coordinator also writes the index."""

    def __init__(self, storage: Storage, folder: str, *, rank: int) -> None:
        super().__init__()
        self._storage = storage
        self._folder = folder
        self._file = file_of(rank)
        self.written: dict[str, FileDigest] = {}  # by name

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the tensors and values of this rank to one file."""
        parts = [(item.index, _as_tensor(planner.resolve_data(item))) for item in plan.items]
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(parts) if parts else [])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Coordinator: write the index."""
        places = {each.index: each.storage_data for part in results for each in part}
        content = json.dumps(_index_of(metadata, places)).encode()
        with self._storage.create(self._folder, INDEX) as stream:
            stream.write(content)
        self.written[INDEX] = stream.written

    def _write(self, parts: list[tuple[MetadataIndex, Tensor]]) -> list[WriteResult]:
        head, results = _head(parts), list[WriteResult]()
        start = len(head)
        with self._storage.create(self._folder, self._file) as stream:
            stream.write(head)
            for index, tensor in parts:
                data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                stream.write(data)
                place = Place(self._file, start, data.nbytes, tensor.dtype, tuple(tensor.shape))
                results.append(WriteResult(index, data.nbytes, place))
                start += data.nbytes
        self.written[self._file] = stream.written
        return results

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between two checkpoints."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Nothing to add."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """`Checkpoints` names the folders, not torch."""
        return False


class CheckpointReader(StorageReader):
    """Reads what a rank needs of a checkpoint."""

    def __init__(self, storage: Storage, folder: str) -> None:
        super().__init__()
        self._storage = storage
        self._folder = folder
        self._places: Places = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, with the places of everything as `storage_data`.

        Raises:
            IntegrityError: it is damaged.
        """
        try:
            return _metadata_of(json.loads(self._storage.read(self._folder, INDEX)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            cause = f"{type(error).__name__}: {error}"
            raise IntegrityError(f"{self._folder}/{INDEX} is damaged: {cause}") from error

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Keep the places."""
        self._places = metadata.storage_data

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for, one file after the other."""
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self._places[item.storage_index].file].append(item)
        for file, items in by_file.items():
            with self._storage.open(self._folder, file) as stream:
                for item in items:
                    self._read(stream, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors whose names begin with `prefix`, whatever world size wrote them.

        One at a time is in memory. Names are without the prefix.

        Raises:
            IntegrityError: a chunk is missing.
            UnavailableError: the storage does not answer.
        """
        metadata = self.read_metadata()
        for fqn, stored in sorted(metadata.state_dict_metadata.items()):
            if fqn.startswith(prefix) and isinstance(stored, TensorStorageMetadata):
                places = [
                    (chunk.offsets, metadata.storage_data[MetadataIndex(fqn, chunk.offsets)])
                    for chunk in stored.chunks
                ]
                yield fqn.removeprefix(prefix), self._assembled(fqn, stored, places)

    def _assembled(
        self,
        fqn: str,
        stored: TensorStorageMetadata,
        places: Sequence[tuple[torch.Size, Place]],
    ) -> Tensor:
        whole = torch.empty(stored.size, dtype=stored.properties.dtype)
        num_read = 0
        for offsets, place in places:
            with self._storage.open(self._folder, place.file) as stream:
                stream.seek(place.start)
                chunk = _tensor_of(bytearray(stream.read(place.num_bytes)), place)
            target = whole
            for dim, (start, length) in enumerate(zip(offsets, place.sizes, strict=True)):
                target = target.narrow(dim, start, length)
            target.copy_(chunk)
            num_read += chunk.numel()
        if num_read != whole.numel():
            raise IntegrityError(f"{self._folder}: {fqn} has {num_read} of {whole.numel()} numbers")
        return whole

    def _read(self, stream: Any, item: ReadItem, planner: LoadPlanner) -> None:
        place = self._places[item.storage_index]
        stream.seek(place.start)
        data = bytearray(stream.read(place.num_bytes))
        if len(data) != place.num_bytes:
            raise IntegrityError(f"{self._folder}/{place.file} has no {item.storage_index.fqn}")
        if item.type is LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(data))
            return
        chunk = _tensor_of(data, place)
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            chunk = chunk.narrow(dim, start, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(chunk)
        planner.commit_tensor(item, target)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between two checkpoints."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """`Checkpoints` names the folders, not torch."""
        return False


def files_of(metadata: Metadata) -> set[str]:
    """The files that an index refers to, and its own."""
    places: Places = metadata.storage_data
    return {INDEX, *(place.file for place in places.values())}


def _as_tensor(data: Tensor | io.BytesIO) -> Tensor:
    if isinstance(data, Tensor):
        return data
    return torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)


def _tensor_of(data: bytearray, place: Place) -> Tensor:
    if not data:
        return torch.empty(place.sizes, dtype=place.dtype)
    return torch.frombuffer(data, dtype=place.dtype).reshape(place.sizes)


def _head(parts: list[tuple[MetadataIndex, Tensor]]) -> bytes:
    """The beginning of a safetensors file with these tensors."""
    entries: dict[str, Any] = {}
    end = 0
    for index, tensor in parts:
        start, end = end, end + tensor.nbytes
        where = ",".join(map(str, index.offset or ())) if any(index.offset or ()) else ""
        entries[f"{index.fqn}@{where}" if where else index.fqn] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _index_of(metadata: Metadata, places: Places) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for fqn, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            values[fqn] = _place_json(places[MetadataIndex(fqn)])
            continue
        chunks = [
            {
                "offsets": list(chunk.offsets),
                "sizes": list(chunk.sizes),
                **_place_json(places[MetadataIndex(fqn, chunk.offsets)]),
            }
            for chunk in stored.chunks
        ]
        dtype = _NAMES[stored.properties.dtype]
        tensors[fqn] = {"dtype": dtype, "size": list(stored.size), "chunks": chunks}
    return {"tensors": tensors, "values": values}


def _place_json(place: Place) -> dict[str, Any]:
    return {"file": place.file, "start": place.start, "num_bytes": place.num_bytes}


def _metadata_of(index: Any) -> Metadata:
    """Parse an index; raises the errors of a document of another shape."""
    stored: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, Place] = {}
    for fqn, value in index["values"].items():
        stored[fqn] = BytesStorageMetadata()
        places[MetadataIndex(fqn)] = _place_of(value, torch.uint8, [value["num_bytes"]])
    for fqn, tensor in index["tensors"].items():
        dtype = _DTYPES[tensor["dtype"]]
        chunks = [
            ChunkStorageMetadata(torch.Size(each["offsets"]), torch.Size(each["sizes"]))
            for each in tensor["chunks"]
        ]
        properties = TensorProperties(dtype=dtype)
        stored[fqn] = TensorStorageMetadata(properties, torch.Size(tensor["size"]), chunks)
        for chunk, each in zip(chunks, tensor["chunks"], strict=True):
            places[MetadataIndex(fqn, chunk.offsets)] = _place_of(each, dtype, each["sizes"])
    return Metadata(state_dict_metadata=stored, storage_data=places)


def _place_of(value: Any, dtype: torch.dtype, sizes: list[int]) -> Place:
    file, start, num_bytes = str(value["file"]), int(value["start"]), int(value["num_bytes"])
    if not _FILE.fullmatch(file) or min(start, num_bytes, *sizes, 0) < 0:
        raise ValueError(f"{value!r} is no place in a file")
    if num_bytes != torch.Size(sizes).numel() * dtype.itemsize:
        raise ValueError(f"{sizes} of {dtype} are not {num_bytes} bytes")
    return Place(file, start, num_bytes, dtype, tuple(sizes))


def _to_json(value: Any, name: str) -> Any:
    """Numbers, texts, and lists and tuples of them; a tuple is `{"tuple": [...]}`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_to_json(each, name) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [_to_json(each, name) for each in value]}
    raise StateError(f"checkpoint: {name} is a {type(value).__name__}, which it cannot hold")


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(each) for each in value]
    if isinstance(value, dict):
        return tuple(_from_json(each) for each in value["tuple"])
    return value
