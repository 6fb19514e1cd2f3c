"""Three ways of a snapshot into a server: in the request, over disk, by broadcast."""

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
from paceline.logs import Log
from paceline_rollout.engines.base import Entry, Snapshot
from paceline_rollout.engines.sglang.api import SglangClient
from paceline_rollout.engines.sglang.broadcast import Broadcast
from paceline_rollout.engines.sglang.capabilities import Capabilities

TMPFS = Path("/dev/shm")
_ALIGN = 64
_SAFETENSORS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
Bucket = list[tuple[Entry, memoryview]]
log = Log("sglang")


@dataclass(frozen=True, slots=True)
class Loading:
    """How weights reach a server."""

    way: Literal["tensor", "disk", "distributed"]
    ranks: int  # that the server spreads them over by itself
    shared_memory: bool  # whether the server sees this machine's memory
    folder: Path | None  # that both see
    bucket_bytes: int
    backend: str  # of the process group


class Loader:
    """Loads whole snapshots; the server is paused, or idle, while it does."""

    def __init__(
        self, *, client: SglangClient, capabilities: Capabilities, loading: Loading
    ) -> None:
        self._client = client
        self._sessions = capabilities.sessions
        self._how = loading
        self._broadcast = Broadcast(client=client, ranks=loading.ranks, backend=loading.backend)

    async def load(self, snapshot: Snapshot, *, flush: bool) -> None:
        """Put all tensors in place; after a failure the server's weights are undefined.

        Raises:
            PacelineError: by none of the ways that this server allows.
        """
        if self._how.way == "disk":
            await self._from_disk(snapshot, flush=flush)
            return
        try:
            await self._in_session(snapshot, flush=flush)
        except UnavailableError:
            raise
        except PacelineError as error:
            if self._how.folder is None:
                raise
            log.warning("loading over disk instead", way=self._how.way, error=error)
            await self._from_disk(snapshot, flush=flush)

    def leave(self) -> None:
        """Forget the process group; the server is gone, or will be."""
        self._broadcast.forget()

    async def _in_session(self, snapshot: Snapshot, *, flush: bool) -> None:
        send = self._send if self._how.way == "tensor" else self._broadcast.send
        await self._begin()
        try:
            buckets = list(buckets_of(snapshot, self._how.bucket_bytes))
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
            # Whoever opened the session before did not live to close it.
            await self._client.end_update()
            await self._client.begin_update()

    async def _send(self, bucket: Bucket, labels: dict[str, Any]) -> None:
        try:
            held, payload = await asyncio.to_thread(
                pack, bucket, shared_memory=self._how.shared_memory
            )
        except RuntimeError as error:
            # PyTorch keeps shared memory in a process of its own, which may be slow or gone.
            raise PacelineError(f"no shared memory: {str(error).partition(chr(10))[0]}") from error
        body = {
            "serialized_named_tensors": [payload] * self._how.ranks,
            "load_format": "flattened_bucket",
            **labels,
        }
        await self._client.update_from_tensor(body)
        # Shared memory lives as long as the tensor that made it.
        del held

    async def _from_disk(self, snapshot: Snapshot, *, flush: bool) -> None:
        base = self._how.folder
        if base is None:
            raise InvalidError("rollout.engine.folder: is needed for a server of someone else")
        path = Path(await asyncio.to_thread(tempfile.mkdtemp, "", "paceline-weights-", base))
        try:
            await asyncio.to_thread(write_safetensors, path / "model.safetensors", snapshot)
            body = {"model_path": str(path), "load_format": "safetensors"}
            await self._client.update_from_disk(
                {**body, **_labels(snapshot, last=True, flush=flush)}
            )
        finally:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)


def folder_for(given: Path | None, *, attached: bool) -> Path | None:
    """Where weights go on their way over disk: memory, if the machine has such a folder."""
    if given is not None or attached:
        return given
    return TMPFS if TMPFS.is_dir() else Path(tempfile.gettempdir())


def buckets_of(snapshot: Snapshot, most_bytes: int) -> Iterator[Bucket]:
    """Tensors in order, in as few parts as the size allows."""
    bucket: Bucket = []
    size = 0
    for entry, data in snapshot.tensors():
        if bucket and size + len(data) > most_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((entry, data))
        size += len(data)
    if bucket:
        yield bucket


def pack(bucket: Bucket, *, shared_memory: bool) -> tuple[torch.Tensor, str]:
    """A flattened bucket as SGLang takes it, and the tensor that has to outlive the call."""
    places, size = _places(bucket)
    flat = torch.empty(size, dtype=torch.uint8)
    if shared_memory:
        # SGLang's process cannot take file descriptors over, only names.
        before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            flat.share_memory_()
            _fill(flat, bucket, places)
            data = _by_name(_content(flat, bucket, places))
        finally:
            torch.multiprocessing.set_sharing_strategy(before)
    else:
        _fill(flat, bucket, places)
        data = pickle.dumps(_content(flat, bucket, places))
    return flat, base64.b64encode(data).decode()


def write_safetensors(path: Path, snapshot: Snapshot) -> None:
    """The snapshot as one file in the usual format, without copying it first."""
    header: dict[str, Any] = {}
    parts: list[memoryview] = []
    at = 0
    for entry, data in snapshot.tensors():
        kind = _SAFETENSORS.get(entry.dtype)
        if kind is None:
            allowed = ", ".join(_SAFETENSORS)
            raise InvalidError(f"snapshot: {entry.name} is {entry.dtype}; allowed: {allowed}")
        place = [at, at + len(data)]
        header[entry.name] = {"dtype": kind, "shape": list(entry.shape), "data_offsets": place}
        parts.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for part in parts:
            out.write(part)


def _labels(snapshot: Snapshot, *, last: bool, flush: bool) -> dict[str, Any]:
    version = {"weight_version": str(snapshot.header.version)} if last else {}
    return {"flush_cache": flush, "abort_all_requests": False, **version}


def _places(bucket: Bucket) -> tuple[list[int], int]:
    places: list[int] = []
    at = 0
    for _, data in bucket:
        places.append(at)
        at += -(-len(data) // _ALIGN) * _ALIGN
    return places, at


def _fill(flat: torch.Tensor, bucket: Bucket, places: Sequence[int]) -> None:
    for place, (_, data) in zip(places, bucket, strict=True):
        flat[place : place + len(data)] = torch.frombuffer(data, dtype=torch.uint8)


def _content(flat: torch.Tensor, bucket: Bucket, places: Sequence[int]) -> dict[str, Any]:
    # SGLang reads attributes only, so its own class for this need not be imported.
    metadata = [
        SimpleNamespace(
            name=entry.name,
            shape=torch.Size(entry.shape),
            dtype=getattr(torch, entry.dtype),
            start_idx=place,
            end_idx=place + len(data),
            numel=len(data),
        )
        for place, (entry, data) in zip(places, bucket, strict=True)
    ]
    return {"flattened_tensor": flat, "metadata": metadata}


def _by_name(content: Any) -> bytes:
    out = io.BytesIO()
    ForkingPickler(out, pickle.HIGHEST_PROTOCOL).dump(content)
    return out.getvalue()
