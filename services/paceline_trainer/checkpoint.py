"""Checkpoints of model, optimiser and random state, whole or not at all, for any world size."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from paceline.errors import FencedError, IntegrityError, NotFoundError, UnavailableError
from paceline_trainer.distributed import Group
from paceline_trainer.model import Policy
from paceline_trainer.optimizer import Optimizer
from paceline_trainer.storage import Sizes, Storage

META = "paceline.json"
_NAME = re.compile(r"step-(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class _Folder:
    """`step-000040.2`: what incarnation 2 wrote after 40 steps. Nobody else writes there."""

    step: int
    incarnation: int

    @property
    def name(self) -> str:
        return f"step-{self.step:06d}.{self.incarnation}"


class Checkpoints:
    """One folder for each step and incarnation, in a storage without renames or locks.

    `paceline.json` is written last and names all files with their sizes. A checkpoint counts when
    these are all there: so neither a death while writing or removing, nor a replaced trainer that
    goes on writing while its folder is removed, leaves one that only looks whole.
    """

    def __init__(self, place: Path | str, *, group: Group, keep: int, incarnation: int = 0) -> None:
        self._storage = Storage(place)
        self._group = group
        self._keep = keep
        self._incarnation = incarnation

    def path(self, step: int) -> str:
        """Where the newest checkpoint of a step lives.

        Raises:
            NotFoundError: there is none.
        """
        return self._storage.where(self._newest(step).name)

    def steps(self) -> list[int]:
        """Steps with a whole checkpoint, rising; raises `UnavailableError` if that is unknown."""
        return sorted({folder.step for folder in self._whole(self._storage.folders())})

    def latest(self, *, most: int) -> int:
        """The newest step up to `most` with a whole checkpoint; 0: none; raises as `steps`."""
        return max((step for step in self.steps() if step <= most), default=0)

    def save(self, step: int, policy: Policy, optimizer: Optimizer) -> str:
        """Collective: write the state after `step` updates, keep the newest few.

        Raises:
            FencedError: a newer incarnation has written this step.
            IntegrityError: files were lost meanwhile.
            UnavailableError: the storage cannot be written.
        """
        folder = _Folder(step, self._incarnation)
        if self._group.place.first:
            self._storage.remove(folder.name, first=META)
        self._group.barrier()
        model, inner = get_state_dict(policy, optimizer.inner)
        random = {str(self._group.place.rank): torch.get_rng_state()}
        state = {"model": model, "optimizer": inner, "random": random}
        with _translated(folder.name):
            save(state, storage_writer=self._storage.writer(folder.name))
        if self._group.place.first:
            self._finish(folder)
        self._group.barrier()
        return self._storage.where(folder.name)

    def load(self, step: int, policy: Policy, optimizer: Optimizer) -> None:
        """Collective: go back to the checkpoint of a step, whatever world size wrote it.

        Raises:
            NotFoundError: there is none.
            UnavailableError: the storage cannot be read.
        """
        folder = self._newest(step)
        reader = self._storage.reader(folder.name)
        model, inner = get_state_dict(policy, optimizer.inner)
        state: dict[str, Any] = {"model": model, "optimizer": inner}
        rank = str(self._group.place.rank)
        if f"random.{rank}" in reader.read_metadata().state_dict_metadata:
            state["random"] = {rank: torch.get_rng_state()}
        with _translated(folder.name):
            load(state, storage_reader=reader)
        set_state_dict(
            policy,
            optimizer.inner,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        if "random" in state:
            torch.set_rng_state(state["random"][rank])

    def discard_after(self, step: int) -> None:
        """Rank 0: remove checkpoints of a branch that the ledger has left."""
        for folder in _folders(self._storage.folders()):
            if folder.step > step and folder.incarnation <= self._incarnation:
                self._storage.remove(folder.name, first=META)

    def discard(self, step: int) -> None:
        """Rank 0: remove this incarnation's checkpoint of a step."""
        self._storage.remove(_Folder(step, self._incarnation).name, first=META)

    def _newest(self, step: int) -> _Folder:
        found = [each for each in self._whole(self._storage.folders()) if each.step == step]
        if not found:
            raise NotFoundError(f"no checkpoint of step {step}; whole are {self.steps()}")
        return max(found)

    def _whole(self, listed: dict[str, Sizes]) -> Iterator[_Folder]:
        for folder in _folders(listed):
            files = listed[folder.name]
            if META in files and self._named(folder).items() <= files.items():
                yield folder

    def _named(self, folder: _Folder) -> Sizes:
        try:
            return json.loads(self._storage.read(folder.name, META))["files"]
        except FileNotFoundError:  # removed since it was listed
            return {META: -1}

    def _finish(self, folder: _Folder) -> None:
        listed = self._storage.folders()
        if any(self._replaced(each, folder) for each in self._whole(listed)):
            raise FencedError(
                f"a newer incarnation has written the checkpoint of step {folder.step}"
            )
        files = listed.get(folder.name, {})
        metadata = self._storage.reader(folder.name).read_metadata()
        needed = {str(part.relative_path) for part in (metadata.storage_data or {}).values()}
        if lost := needed - files.keys():
            raise IntegrityError(f"{folder.name}: {min(lost)} was lost while it was written")
        content = {
            "step": folder.step,
            "world_size": self._group.place.world,
            "incarnation": folder.incarnation,
            "files": files,
        }
        self._storage.seal(folder.name, META, json.dumps(content).encode())
        self._clean_up(newest=folder.step)

    def _replaced(self, other: _Folder, mine: _Folder) -> bool:
        return other.step == mine.step and other.incarnation > mine.incarnation

    def _clean_up(self, *, newest: int) -> None:
        """Keep the newest few; the rest is old, unfinished, or of a branch that was left."""
        listed = self._storage.folders()
        found = (folder for folder in sorted(self._whole(listed)) if folder.step <= newest)
        whole = {folder.step: folder for folder in found}
        kept = [whole[step] for step in sorted(whole)[-self._keep :]]
        for folder in _folders(listed):
            if folder not in kept and folder.incarnation <= self._incarnation:
                self._storage.remove(folder.name, first=META)


def _folders(listed: dict[str, Sizes]) -> Iterator[_Folder]:
    matches = (_NAME.fullmatch(name) for name in listed)
    return (_Folder(int(m[1]), int(m[2])) for m in matches if m)


@contextmanager
def _translated(name: str) -> Generator[None]:
    """What torch gathers from all ranks is no `Exception`; the first of them leaves as ours."""
    try:
        yield
    except CheckpointException as error:
        rank, (first, _) = min(error.failures.items())
        text = f"{name}: rank {rank}: {type(first).__name__}: {first}"
        raise UnavailableError(text) from error
