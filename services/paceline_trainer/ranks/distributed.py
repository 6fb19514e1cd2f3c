"""The process group of all ranks: its mesh, and the collectives beside those of FSDP."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from copy import copy
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import ProcessGroup

from paceline.errors import ConfigError, UnavailableError
from paceline_trainer.ranks.rank_info import RankInfo

TIMEOUT = timedelta(minutes=30)
STORE_TIMEOUT = timedelta(seconds=30)
STOP_KEY = "paceline/stop"
Value = TypeVar("Value")
TCPStore = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]


class RankGroup:
    """All ranks of a trainer. Methods are collective: all ranks call them in the same order."""

    def __init__(self, rank_info: RankInfo) -> None:
        """Meet the other ranks.

        Raises:
            ConfigError: this node has fewer GPUs than ranks.
        """
        self.rank_info = rank_info
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        self.device = device_of(rank_info, num_gpus)
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        if rank_info.world == 1:
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        else:
            dist.init_process_group(backend, timeout=TIMEOUT)
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, (rank_info.world,))
        self.processes: ProcessGroup | None = None  # of the collectives below; None: the default

    def beside(self) -> RankGroup:
        """Collective: the same ranks, for a thread whose collectives run beside this group's.

        It has no mesh of its own: what it gathers is in the memory of the host.
        """
        other = copy(self)
        if self.rank_info.world > 1:
            other.processes = cast(ProcessGroup, dist.new_group(backend="gloo", timeout=TIMEOUT))
        return other

    def gather(self, values: Sequence[float]) -> NDArray[np.float64]:
        """The numbers of all ranks, [world, len(values)]."""
        local = torch.tensor(values, dtype=torch.float64)
        if self.rank_info.world == 1:
            return local[None].numpy()
        gathered = [torch.empty_like(local) for _ in range(self.rank_info.world)]
        dist.all_gather(gathered, local, group=self.processes)
        return torch.stack(gathered).numpy()

    def gather_objects(self, value: Value) -> list[Value]:
        """The values of all ranks, in order of rank."""
        if self.rank_info.world == 1:
            return [value]
        gathered: list[Any] = [None] * self.rank_info.world
        dist.all_gather_object(gathered, value, group=self.processes)
        return gathered

    def from_first(self, value: int) -> int:
        """Rank 0's number, on every rank."""
        return int(self.gather([value])[0, 0])

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return bool(self.gather([flag]).any())

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather([0.0])

    def close(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def device_of(rank_info: RankInfo, num_gpus: int) -> torch.device:
    """A GPU of the rank alone, as NCCL requires; the CPU on a node that has none.

    Raises:
        ConfigError: the node has fewer GPUs than ranks. All its ranks raise it, so none waits.
    """
    if not num_gpus:
        return torch.device("cpu")
    if rank_info.local_world > num_gpus:
        raise ConfigError(
            f"trainer.world_size: {rank_info.local_world} ranks on a node that has {num_gpus} "
            f"GPU{'s' if num_gpus > 1 else ''}, and each rank needs one; have at most so many "
            "ranks, or train on CPUs, by starting Paceline with CUDA_VISIBLE_DEVICES set to nothing"
        )
    return torch.device("cuda", rank_info.local_rank)


class Noticeboard:
    """Lets ranks tell each other to stop, and what they are at, whatever they are waiting for.

    It has its own connection to the store of torchrun, so any thread may call it while another
    one is in a collective.
    """

    def __init__(self, rank_info: RankInfo) -> None:
        """Connect; raises `UnavailableError` when the store cannot be reached."""
        self._store: TCPStore | None = None
        self._rank, self._world = rank_info.rank, rank_info.world
        if rank_info.world == 1:
            return
        try:
            self._store = TCPStore(
                rank_info.master_host, rank_info.master_port, is_master=False, timeout=STORE_TIMEOUT
            )
        except dist.DistError as error:
            where = f"{rank_info.master_host}:{rank_info.master_port}"
            raise UnavailableError(f"the store of torchrun at {where}: {error}") from error

    def request_stop(self) -> None:
        """Tell all ranks to stop; idempotent."""
        if self._store is not None:
            with self._errors():
                self._store.set(STOP_KEY, "1")

    def stop_requested(self) -> bool:
        """Whether any rank has to stop; raises `UnavailableError` if the store is gone."""
        if self._store is None:
            return False
        with self._errors():
            return self._store.check([STOP_KEY])

    def show(self, name: str, value: str) -> None:
        """Show something of this rank to all others, in place of what it showed by this name."""
        if self._store is not None:
            with self._errors():
                self._store.set(f"{name}/{self._rank}", value)

    def shown(self, name: str) -> dict[int, str]:
        """What the ranks show by this name, as far as they do, by rank."""
        if self._store is None:
            return {}
        with self._errors():
            there = [rank for rank in range(self._world) if self._store.check([f"{name}/{rank}"])]
            values = self._store.multi_get([f"{name}/{rank}" for rank in there]) if there else []
        return {rank: value.decode() for rank, value in zip(there, values, strict=True)}

    @contextmanager
    def _errors(self) -> Generator[None]:
        try:
            yield
        except dist.DistError as error:
            raise UnavailableError(f"the store of torchrun is gone: {error}") from error
