"""The group of ranks: its mesh and the few small exchanges beside FSDP's own."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.errors import UnavailableError
from paceline_trainer.place import Place

TIMEOUT = timedelta(minutes=30)
STORE_TIMEOUT = timedelta(seconds=30)
STOP_KEY = "paceline/stop"
Value = TypeVar("Value")
TCPStore = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]


class Group:
    """All ranks of one trainer. Its methods are collective: every rank calls them in one order."""

    def __init__(self, place: Place) -> None:
        self.place = place
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", place.local_rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        if place.world == 1:
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        else:
            dist.init_process_group(backend, timeout=TIMEOUT)
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, (place.world,))

    def gather(self, values: Sequence[float]) -> NDArray[np.float64]:
        """The numbers of all ranks, [world, len(values)]."""
        mine = torch.tensor(values, dtype=torch.float64)
        if self.place.world == 1:
            return mine[None].numpy()
        seen = [torch.empty_like(mine) for _ in range(self.place.world)]
        dist.all_gather(seen, mine)
        return torch.stack(seen).numpy()

    def gather_objects(self, value: Value) -> list[Value]:
        """What all ranks have, by rank."""
        if self.place.world == 1:
            return [value]
        seen: list[Any] = [None] * self.place.world
        dist.all_gather_object(seen, value)
        return seen

    def from_first(self, value: int) -> int:
        """Rank 0's number, on every rank."""
        return int(self.gather([value])[0, 0])

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return bool(self.gather([flag]).any())

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather([0.0])

    def close(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()


class Bell:
    """A rank that has to end rings; the others hear it whatever they are waiting for.

    Uses the store of torchrun over a connection of its own, so that any thread may call it while
    another one is inside a collective.
    """

    def __init__(self, place: Place) -> None:
        """Connect; raises `UnavailableError` when the store cannot be reached."""
        self._store: TCPStore | None = None
        if place.world == 1:
            return
        try:
            self._store = TCPStore(
                place.master_host, place.master_port, is_master=False, timeout=STORE_TIMEOUT
            )
        except dist.DistError as error:
            where = f"{place.master_host}:{place.master_port}"
            raise UnavailableError(f"the store of torchrun at {where}: {error}") from error

    def ring(self) -> None:
        """Tell all ranks; once is enough."""
        if self._store is not None:
            with self._errors():
                self._store.set(STOP_KEY, "1")

    def rung(self) -> bool:
        """Whether any rank has rung; raises `UnavailableError` when the store is gone."""
        if self._store is None:
            return False
        with self._errors():
            return self._store.check([STOP_KEY])

    @contextmanager
    def _errors(self) -> Generator[None]:
        try:
            yield
        except dist.DistError as error:
            raise UnavailableError(f"the store of torchrun is gone: {error}") from error
