"""Checkpoints of model, optimiser and random state, whole or not at all, for any world size."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from paceline.errors import FencedError
from paceline_trainer.distributed import Group
from paceline_trainer.model import Policy
from paceline_trainer.optimizer import Optimizer

META = "paceline.json"


class Checkpoints:
    """Folders `step-XXXXXX`; one appears under this name only when it is durable."""

    def __init__(self, folder: Path, *, group: Group, keep: int, incarnation: int = 0) -> None:
        self._folder = folder
        self._group = group
        self._keep = keep
        self._incarnation = incarnation

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step lives."""
        return self._folder / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Steps with a whole checkpoint, rising."""
        found = self._folder.glob(f"step-*/{META}")
        return sorted(int(path.parent.name.removeprefix("step-")) for path in found)

    def latest(self, *, most: int) -> int:
        """The newest step up to `most` with a whole checkpoint; 0: none."""
        return max((step for step in self.steps() if step <= most), default=0)

    def save(self, step: int, policy: Policy, optimizer: Optimizer) -> Path:
        """Collective: write the state after `step` updates, keep the newest few."""
        unfinished = self._folder / f".step-{step:06d}.{self._incarnation}"
        if self._group.place.first:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        self._group.barrier()
        model, inner = get_state_dict(policy, optimizer.inner)
        random = {str(self._group.place.rank): torch.get_rng_state()}
        state = {"model": model, "optimizer": inner, "random": random}
        save(state, storage_writer=FileSystemWriter(unfinished, sync_files=True))
        if self._group.place.first:
            self._finish(unfinished, step)
        self._group.barrier()
        return self.path(step)

    def load(self, step: int, policy: Policy, optimizer: Optimizer) -> None:
        """Collective: go back to the checkpoint of a step, whatever world size wrote it."""
        reader = FileSystemReader(self.path(step))
        model, inner = get_state_dict(policy, optimizer.inner)
        state: dict[str, Any] = {"model": model, "optimizer": inner}
        rank = str(self._group.place.rank)
        if f"random.{rank}" in reader.read_metadata().state_dict_metadata:
            state["random"] = {rank: torch.get_rng_state()}
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
        for later in self.steps():
            if later > step:
                shutil.rmtree(self.path(later), ignore_errors=True)

    def discard(self, step: int) -> None:
        """Rank 0: remove this incarnation's checkpoint of a step."""
        if self._writer(step) == self._incarnation:
            shutil.rmtree(self.path(step), ignore_errors=True)

    def _writer(self, step: int) -> int:
        """The incarnation that wrote a checkpoint; -1: there is none."""
        meta = self.path(step) / META
        return int(json.loads(meta.read_text())["incarnation"]) if meta.is_file() else -1

    def _finish(self, unfinished: Path, step: int) -> None:
        if self._writer(step) > self._incarnation:
            raise FencedError(f"a newer incarnation has written the checkpoint of step {step}")
        meta = unfinished / META
        world = self._group.place.world
        content = {"step": step, "world_size": world, "incarnation": self._incarnation}
        meta.write_text(json.dumps(content))
        _sync(meta)
        _sync(unfinished)
        shutil.rmtree(self.path(step), ignore_errors=True)
        unfinished.rename(self.path(step))
        _sync(self._folder)
        for old in self.steps()[: -self._keep]:
            shutil.rmtree(self.path(old), ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
