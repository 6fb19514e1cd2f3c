"""Loads a snapshot into a server in one of three ways: request, disk, broadcast."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import pickle
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch

from paceline.errors import InvalidError, NotFoundError, PacelineError, UnavailableError
from paceline.platform.telemetry.logs import Log
from paceline.plugins import TensorSpec, WeightSnapshot
from paceline_rollout.engines.sglang.api import SglangClient
from paceline_rollout.engines.sglang.broadcast import TensorBroadcast
from paceline_rollout.engines.sglang.capabilities import Capabilities
from paceline_rollout.engines.sglang.proof import FirstLoad

TMPFS = Path("/dev/shm")
_ALIGN = 64
_SAFETENSORS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
Bucket = list[tuple[TensorSpec, memoryview]]
log = Log("sglang")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How weights are transferred to a server."""

    method: Literal["tensor", "disk", "distributed"]
    ranks: int  # over which the server shards them by itself
    shared_memory: bool  # whether the server shares this machine's memory
    folder: Path | None  # on a file system that both can access
    bucket_bytes: int
    backend: str  # of the process group


class Loader:
    """Loads complete snapshots; the server must be paused or idle."""

    def __init__(
        self,
        *,
        client: SglangClient,
        capabilities: Capabilities,
        options: LoadOptions,
        proof: FirstLoad | None = None,
    ) -> None:
        """`proof`: of a server that has not loaded anything yet; dropped once it has."""
        self._client = client
        self._sessions = capabilities.sessions
        self._options = options
        self._proof = proof
        self._broadcast = TensorBroadcast(
            client=client, ranks=options.ranks, backend=options.backend
        )

    async def load(self, snapshot: WeightSnapshot, *, flush: bool) -> None:
        """Load all tensors; after a failure the server's weights are undefined.

        Raises:
            PacelineError: all methods that this server supports failed.
            MisfitError: the server has left out some of its tensors.
        """
        if self._proof is None:
            await self._load(snapshot, flush=flush)
            return
        await self._proof.begin()
        await self._load(snapshot, flush=flush)
        await self._proof.check()
        self._proof = None

    async def _load(self, snapshot: WeightSnapshot, *, flush: bool) -> None:
        if self._options.method == "disk":
            await self._from_disk(snapshot, flush=flush)
            return
        try:
            await self._in_session(snapshot, flush=flush)
        except UnavailableError:
            raise
        except PacelineError as error:
            if self._options.folder is None:
                raise
            log.warning("loading from disk instead", method=self._options.method, error=error)
            await self._from_disk(snapshot, flush=flush)

    def reset(self) -> None:
        """Drop the process group without leaving it: the server has ended or is about to."""
        self._broadcast.reset()

    async def _in_session(self, snapshot: WeightSnapshot, *, flush: bool) -> None:
        send = self._send if self._options.method == "tensor" else self._broadcast.send
        await self._begin()
        try:
            buckets = list(buckets_of(snapshot, self._options.bucket_bytes))
            for number, bucket in enumerate(buckets, 1):
                last = number == len(buckets)
                await send(bucket, _labels(snapshot, last=last, flush=flush and last))
        finally:
            if self._sessions:
                await self._client.end_update()

    async def _begin(self) -> None:
        if not self._sessions:
            return
        try:
            await self._client.begin_update()
        except NotFoundError:
            self._sessions = False
        except InvalidError:
            # An earlier worker died without closing its session.
            await self._client.end_update()
            await self._client.begin_update()

    async def _send(self, bucket: Bucket, labels: dict[str, Any]) -> None:
        try:
            tensor, payload = await asyncio.to_thread(
                pack, bucket, shared_memory=self._options.shared_memory
            )
        except RuntimeError as error:
            # PyTorch manages shared memory in a separate process, which may be slow or dead.
            raise PacelineError(f"no shared memory: {str(error).partition(chr(10))[0]}") from error
        body = {
            "serialized_named_tensors": [payload] * self._options.ranks,
            "load_format": "flattened_bucket",
            **labels,
        }
        await self._client.update_from_tensor(body)
        # Shared memory is freed with the tensor that owns it.
        del tensor

    async def _from_disk(self, snapshot: WeightSnapshot, *, flush: bool) -> None:
        base = self._options.folder
        if base is None:
            raise InvalidError("rollout.engine.folder: is required for an attached server")
        path = Path(await asyncio.to_thread(tempfile.mkdtemp, "", "paceline-weights-", base))
        try:
            await asyncio.to_thread(write_safetensors, path / "model.safetensors", snapshot)
            body = {"model_path": str(path), "load_format": "safetensors"}
            await self._client.update_from_disk(
                {**body, **_labels(snapshot, last=True, flush=flush)}
            )
        finally:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)


def folder_for(folder: Path | None, *, attached: bool) -> Path | None:
    """The folder for loading from disk: tmpfs if the machine has it, unless one is configured."""
    if folder is not None or attached:
        return folder
    return TMPFS if TMPFS.is_dir() else Path(tempfile.gettempdir())


def buckets_of(snapshot: WeightSnapshot, max_bytes: int) -> Iterator[Bucket]:
    """Group tensors, in order, into buckets of at most `max_bytes`."""
    bucket: Bucket = []
    size = 0
    for entry, data in snapshot.tensors():
        if bucket and size + len(data) > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((entry, data))
        size += len(data)
    if bucket:
        yield bucket


def pack(bucket: Bucket, *, shared_memory: bool) -> tuple[torch.Tensor, str]:
    """A flattened bucket in SGLang's format, and the tensor that must outlive the call."""
    offsets, size = _offsets(bucket)
    flat = torch.empty(size, dtype=torch.uint8)
    if shared_memory:
        # SGLang's process can attach shared memory by name, but not by file descriptor.
        before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            flat.share_memory_()
            _fill(flat, bucket, offsets)
            data = _pickle_by_name(_content(flat, bucket, offsets))
        finally:
            torch.multiprocessing.set_sharing_strategy(before)
    else:
        _fill(flat, bucket, offsets)
        data = pickle.dumps(_content(flat, bucket, offsets))
    return flat, base64.b64encode(data).decode()


def write_safetensors(path: Path, snapshot: WeightSnapshot) -> None:
    """Write a snapshot as one safetensors file, without copying it in memory."""
    header: dict[str, Any] = {}
    parts: list[memoryview] = []
    offset = 0
    for entry, data in snapshot.tensors():
        kind = _SAFETENSORS.get(entry.dtype)
        if kind is None:
            allowed = ", ".join(_SAFETENSORS)
            raise InvalidError(f"snapshot: {entry.name} is {entry.dtype}; allowed: {allowed}")
        end = offset + len(data)
        header[entry.name] = {
            "dtype": kind,
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        parts.append(data)
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for part in parts:
            out.write(part)


def _labels(snapshot: WeightSnapshot, *, last: bool, flush: bool) -> dict[str, Any]:
    version = {"weight_version": str(snapshot.header.version)} if last else {}
    return {"flush_cache": flush, "abort_all_requests": False, **version}


def _offsets(bucket: Bucket) -> tuple[list[int], int]:
    offsets: list[int] = []
    offset = 0
    for _, data in bucket:
        offsets.append(offset)
        offset += -(-len(data) // _ALIGN) * _ALIGN
    return offsets, offset


def _fill(flat: torch.Tensor, bucket: Bucket, offsets: Sequence[int]) -> None:
    for offset, (_, data) in zip(offsets, bucket, strict=True):
        flat[offset : offset + len(data)] = torch.frombuffer(data, dtype=torch.uint8)


def _content(flat: torch.Tensor, bucket: Bucket, offsets: Sequence[int]) -> dict[str, Any]:
    # SGLang only reads attributes, so its own class is not needed.
    metadata = [
        SimpleNamespace(
            name=entry.name,
            shape=torch.Size(entry.shape),
            dtype=getattr(torch, entry.dtype),
            start_idx=offset,
            end_idx=offset + len(data),
            numel=len(data),
        )
        for offset, (entry, data) in zip(offsets, bucket, strict=True)
    ]
    return {"flattened_tensor": flat, "metadata": metadata}


def _pickle_by_name(content: Any) -> bytes:
    out = io.BytesIO()
    ForkingPickler(out, pickle.HIGHEST_PROTOCOL).dump(content)
    return out.getvalue()
