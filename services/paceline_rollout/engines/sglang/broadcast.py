"""Broadcasts weights over a process group: this worker is rank 0, then the server's ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from paceline.errors import ConfigError, PacelineError, UnavailableError
from paceline.platform.telemetry.logs import Log
from paceline.plugins import TensorSpec
from paceline_rollout.engines.sglang.api import SglangClient

JOIN_TIMEOUT_S = 120.0
GROUP_NAME = "paceline"
Bucket = list[tuple[TensorSpec, memoryview]]
log = Log("sglang")


class TensorBroadcast:
    """A process group with one server, created on first use: gloo on CPUs, NCCL on GPUs.

    With NCCL, this process needs a GPU that the server does not use.
    """

    def __init__(self, *, client: SglangClient, ranks: int, backend: str) -> None:
        self._client = client
        self._ranks = ranks
        self._backend = backend
        self._device = "cpu" if backend == "gloo" else "cuda"
        self._host = "127.0.0.1"
        self._group: Any = None

    async def send(self, bucket: Bucket, labels: dict[str, Any]) -> None:
        """Broadcast a flattened bucket during a call to the server."""
        if self._group is None:
            await self._join()
        body = {
            "names": [entry.name for entry, _ in bucket],
            "dtypes": [entry.dtype for entry, _ in bucket],
            "shapes": [list(entry.shape) for entry, _ in bucket],
            "group_name": GROUP_NAME,
            "load_format": "flattened_bucket",
            **labels,
        }
        try:
            sent = asyncio.to_thread(self._broadcast, bucket)
            await _both(self._client.update_from_distributed(body), sent)
        except PacelineError:
            # Ranks may be out of step: the next load starts with a new group.
            await self.leave()
            raise

    def reset(self) -> None:
        """Drop the group without telling the server."""
        self._group = None

    async def leave(self) -> None:
        """Leave the group on both sides."""
        self.reset()
        try:
            await self._client.leave_group(GROUP_NAME)
        except PacelineError as error:
            log.info("the server did not leave the group", error=error)

    async def _join(self) -> None:
        if self._device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("rollout.engine.backend: nccl needs a GPU; allowed here: gloo")
        store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            self._host,
            0,
            1 + self._ranks,
            is_master=True,
            timeout=timedelta(seconds=JOIN_TIMEOUT_S),
            wait_for_workers=False,
        )
        body = {
            "master_address": self._host,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": 1 + self._ranks,
            "group_name": GROUP_NAME,
            "backend": self._backend,
        }
        creating = asyncio.to_thread(self._create_group, store)
        self._group = await _both(self._client.join_group(body), creating)

    def _create_group(self, store: Any) -> Any:
        """Rank 0 of the group; the prefixes of its keys are those of `torch.distributed`."""
        for prefix in (GROUP_NAME, f"{GROUP_NAME}/", f"{self._device}/"):
            store = PrefixStore(prefix, store)
        size, wait = 1 + self._ranks, timedelta(seconds=JOIN_TIMEOUT_S)
        if self._backend == "gloo":
            return dist.ProcessGroupGloo(store, 0, size, wait)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = wait  # pyright: ignore[reportPrivateUsage]
        return dist.ProcessGroupNCCL(store, 0, size, options)

    def _broadcast(self, bucket: Bucket) -> None:
        flat = torch.cat([torch.frombuffer(data, dtype=torch.uint8) for _, data in bucket])
        flat = flat.to(self._device)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        self._group.broadcast([flat], options).wait()


async def _both(remote: Coroutine[Any, Any, None], local: Coroutine[Any, Any, Any]) -> Any:
    """The result of the local part; if the server refuses its part, it is left to its timeout."""
    call, part = asyncio.create_task(remote), asyncio.create_task(local)
    await asyncio.wait({call, part}, return_when=asyncio.FIRST_EXCEPTION)
    try:
        if call.done():
            call.result()
        result = await part
    except RuntimeError as error:
        raise UnavailableError(f"broadcast: {error}") from error
    finally:
        part.add_done_callback(lambda done: done.cancelled() or done.exception())
    await call
    return result
