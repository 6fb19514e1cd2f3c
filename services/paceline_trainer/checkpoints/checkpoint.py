"""Atomic checkpoints of model, optimiser and random state, for any world size."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from paceline import __version__
from paceline.errors import FencedError, IntegrityError, NotFoundError, UnavailableError
from paceline.platform.digest import digest_of
from paceline.platform.telemetry.logs import Log
from paceline_trainer.checkpoints.digests import FileDigest
from paceline_trainer.checkpoints.folders import (
    META,
    CheckpointFolder,
    SavedCheckpoint,
    difference,
    folders_in,
    recorded_files,
    size_problem,
)
from paceline_trainer.checkpoints.format import (
    CheckpointReader,
    CheckpointWriter,
    LoadFromJson,
    SaveAsJson,
    files_of,
)
from paceline_trainer.checkpoints.state import (
    COPIED_BYTES,
    StagedCheckpoint,
    Stager,
    trained_state,
)
from paceline_trainer.checkpoints.storage import Sizes, Storage
from paceline_trainer.checkpoints.weights_only import TRAINED, translated
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.step.model import PolicyModel
from paceline_trainer.step.optimizer import Optimizer

log = Log("checkpoints")


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint that can be loaded (step 0: none), and the problems of newer ones."""

    step: int
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """Where a checkpoint is, and how the ledger knows it."""

    path: str
    digest: str  # SHA-256 of `paceline.json` in hex; empty on all ranks but the first


class Checkpoints:
    """One folder per step and incarnation, in a storage without renames or locks.

    `paceline.json` is written last and lists all files with their sizes and digests. A checkpoint
    is complete if all of these exist. So neither a crash during writing or removal, nor a replaced
    trainer that keeps writing while its folder is removed, leaves one that seems complete. Later
    changes show in the digests, which `find` compares; the digest of `paceline.json` itself is in
    the ledger, which nobody who can only write to the storage can change.

    `write` may run in a thread of its own, while training goes on; all else is called by the
    thread of all other collective work.
    """

    def __init__(
        self,
        url: Path | str,
        *,
        group: RankGroup,
        keep: int,
        incarnation: int = 0,
        copied_bytes: int = COPIED_BYTES,
    ) -> None:
        """`copied_bytes`: up to this, a state is copied rather than written in place."""
        self._storage = Storage(url)
        self._group = group
        self._writers = group.beside()
        self._stager = Stager(group, copied_bytes=copied_bytes)
        self._keep = keep
        self._incarnation = incarnation
        self._found: CheckpointFolder | None = None  # intact, according to `find`
        self._damaged: list[CheckpointFolder] = []  # skipped by `find`

    def path(self, step: int) -> str:
        """Path or URL of the newest checkpoint of a step.

        Raises:
            NotFoundError: there is none.
        """
        return self._storage.path_of(self._newest(step).name)

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending; raises `UnavailableError`."""
        return sorted({folder.step for folder in self._complete(self._storage.folders())})

    def kept(self, step: int) -> list[int]:
        """The newest `keep` steps up to `step` that can be restored, ascending; raises as `steps`.

        Step 0, the initial model, is among them while there are fewer.
        """
        return sorted({0, *(each for each in self.steps() if each <= step)})[-self._keep :]

    def find(self, *, max_step: int, recorded: Mapping[int, str] | None = None) -> FoundCheckpoint:
        """Collective: the newest intact checkpoint up to rank 0's `max_step`.

        Each file is read once, by one of the ranks. `recorded`, on rank 0, has the digests of the
        checkpoints that the ledger knows, by step: none but these are found. Without it every
        checkpoint is taken for what it says of itself.

        Raises:
            UnavailableError: the storage cannot be read.
        """
        complete, damaged = [], []
        if self._group.rank_info.first:
            complete, damaged = self._candidates(max_step, recorded)
        self._found, self._damaged = None, []
        while True:
            own = complete.pop() if complete else CheckpointFolder(0, 0)
            digest = None if recorded is None else recorded.get(own.step, "")
            folder, digest = self._group.gather_objects((own, digest))[0]
            if not folder.step:
                break
            problems = self._compare(folder, digest)
            if not problems:
                self._found = folder
                break
            damaged += [(folder, problem) for problem in problems]
        newer = [(each, text) for each, text in damaged if each > folder]
        self._damaged = [each for each, _ in newer]
        return FoundCheckpoint(folder.step, tuple(text for _, text in sorted(newer, reverse=True)))

    def save(
        self,
        step: int,
        policy: PolicyModel,
        optimizer: Optimizer,
        slots: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """`stage`, `write` and `clean_up`; returns the path."""
        path = self.write(self.stage(step, policy, optimizer, slots)).path
        if self._group.rank_info.first:
            self.clean_up(newest=step)
        return path

    def stage(
        self,
        step: int,
        policy: PolicyModel,
        optimizer: Optimizer,
        slots: Mapping[str, Any] = MappingProxyType({}),
        extras: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> StagedCheckpoint:
        """Collective: the state after `step` updates, once the one before is written.

        `slots`: tensors of the objective's slots; `extras`: others, which may do without it.
        """
        model, inner = trained_state(policy, optimizer)
        random = {str(self._group.rank_info.rank): torch.get_rng_state()}
        state = {"model": model, "optimizer": inner, "random": random, "slots": {**slots}}
        state["extras"] = {**extras}
        return self._stager.stage(step, state, policy, local=self._storage.local)

    def write(self, staged: StagedCheckpoint) -> WrittenCheckpoint:
        """Collective: write a checkpoint; the one before is there until `clean_up`.

        Raises:
            FencedError: a newer incarnation has written this step.
            IntegrityError: files were lost while they were written.
            UnavailableError: the storage cannot be written.
        """
        folder, group = CheckpointFolder(staged.step, self._incarnation), self._writers
        if group.rank_info.first:
            self._storage.remove(folder.name, first=META)
        group.barrier()
        writer = CheckpointWriter(self._storage, folder.name, rank=group.rank_info.rank)
        with translated(folder.name):
            save(
                staged.state,
                storage_writer=writer,
                planner=SaveAsJson(),
                process_group=group.processes,
            )
        written, digest = group.gather_objects(writer.written), ""
        if group.rank_info.first:
            files = {name: file for each in written for name, file in each.items()}
            digest = self._finish(folder, files)
        group.barrier()
        return WrittenCheckpoint(self._storage.path_of(folder.name), digest)

    def load(
        self,
        step: int,
        policy: PolicyModel,
        optimizer: Optimizer,
        slots: Mapping[str, Any] = MappingProxyType({}),
        extras: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> bool:
        """Collective: load the checkpoint of a step, whatever world size wrote it.

        Loads the one that `find` has returned, if it is of this step. `slots` are filled in place;
        returns whether the checkpoint has all of them, if not they stay as they are. So does each
        of `extras` that it does not have in this shape.

        Raises:
            NotFoundError: there is none.
            UnavailableError: the storage cannot be read.
        """
        found = self._found
        folder = found if found is not None and found.step == step else self._newest(step)
        return self._load(self._storage, folder, policy, optimizer, slots, extras)

    def load_saved(
        self,
        saved: SavedCheckpoint,
        policy: PolicyModel,
        optimizer: Optimizer,
        slots: Mapping[str, Any] = MappingProxyType({}),
    ) -> bool:
        """Collective: as `load`, a checkpoint that another job may have written.

        Its files are not compared with their digests: call `SavedCheckpoint.verify` on one rank.

        Raises:
            UnavailableError: the storage cannot be read, or it is of a model of another shape.
        """
        return self._load(saved.storage, saved.folder, policy, optimizer, slots)

    def _load(
        self,
        storage: Storage,
        folder: CheckpointFolder,
        policy: PolicyModel,
        optimizer: Optimizer,
        slots: Mapping[str, Any],
        extras: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> bool:
        reader = CheckpointReader(storage, folder.name)
        model, inner = trained_state(policy, optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": inner}
        rank = str(self._group.rank_info.rank)
        written = reader.read_metadata().state_dict_metadata
        if f"random.{rank}" in written:
            state["random"] = {rank: torch.get_rng_state()}
        has_slots = all(any(key.startswith(f"slots.{name}") for key in written) for name in slots)
        if has_slots:
            state["slots"] = {**slots}
        state["extras"] = {
            name: each
            for name, each in extras.items()
            if getattr(written.get(f"extras.{name}"), "size", None) == each.shape
        }
        with translated(folder.name):
            load(state, storage_reader=reader, planner=LoadFromJson())
        with policy.in_float32():
            set_state_dict(
                policy,
                optimizer.inner,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
                options=TRAINED,
            )
        policy.changed()
        if "random" in state:
            torch.set_rng_state(state["random"][rank])
        return has_slots

    def discard_after(self, step: int) -> None:
        """Rank 0: remove damaged checkpoints, and those after the step of a rewind.

        Raises:
            UnavailableError: a checkpoint after `step` cannot be removed, and may be mistaken for
                a later one of this incarnation.
        """
        for folder in folders_in(self._storage.folders()):
            if folder.incarnation > self._incarnation:
                continue
            if folder in self._damaged:
                self._try_to_remove(folder)
            elif folder.step > step:
                self._storage.remove(folder.name, first=META)

    def discard(self, step: int) -> None:
        """Rank 0: remove this incarnation's checkpoint of a step."""
        self._storage.remove(CheckpointFolder(step, self._incarnation).name, first=META)

    def _newest(self, step: int) -> CheckpointFolder:
        found = [each for each in self._complete(self._storage.folders()) if each.step == step]
        if not found:
            raise NotFoundError(f"no checkpoint of step {step}; whole are {self.steps()}")
        return max(found)

    def _complete(self, listed: dict[str, Sizes]) -> Iterator[CheckpointFolder]:
        for folder in folders_in(listed):
            if META in listed[folder.name] and not self._problem(folder, listed[folder.name]):
                yield folder

    def _candidates(
        self, max_step: int, recorded: Mapping[int, str] | None
    ) -> tuple[list[CheckpointFolder], list[tuple[CheckpointFolder, str]]]:
        """Checkpoints that seem complete, the newest last, and the problems of others."""
        listed = self._storage.folders()
        complete: list[CheckpointFolder] = []
        damaged: list[tuple[CheckpointFolder, str]] = []
        for folder in sorted(folders_in(listed)):
            files = listed[folder.name]
            if folder.step > max_step or META not in files:
                continue
            if recorded is not None and folder.step not in recorded:
                continue  # the ledger has not heard of it
            problem = self._problem(folder, files)
            if problem:
                damaged.append((folder, problem))
            else:
                complete.append(folder)
        return complete, damaged

    def _problem(self, folder: CheckpointFolder, files: Sizes) -> str:
        """A problem that is visible without reading the files; empty if there is none."""
        try:
            return size_problem(folder, recorded_files(self._storage, folder), files)
        except IntegrityError as error:
            return error.message

    def _compare(self, folder: CheckpointFolder, digest: str | None) -> list[str]:
        """Collective: the problems of all files, each of which is read by one rank."""
        own: list[str] = []
        try:
            recorded = recorded_files(self._storage, folder, digest)
            by_size = sorted(recorded, key=lambda name: (-recorded[name].num_bytes, name))
            rank_info = self._group.rank_info
            own = [
                difference(self._storage, folder, n, recorded[n])
                for n in by_size[rank_info.rank :: rank_info.world]
            ]
        except IntegrityError as error:
            own.append(error.message)
        problems = self._group.gather_objects([text for text in own if text])
        return list(dict.fromkeys(text for each in problems for text in each))

    def _finish(self, folder: CheckpointFolder, written: dict[str, FileDigest]) -> str:
        """Write `paceline.json`; returns its digest."""
        listed = self._storage.folders()
        if any(self._replaced(each, folder) for each in self._complete(listed)):
            raise FencedError(
                f"a newer incarnation has written the checkpoint of step {folder.step}"
            )
        files = listed.get(folder.name, {})
        required = files_of(CheckpointReader(self._storage, folder.name).read_metadata())
        for name in sorted({*required, *written}):
            if name not in files or name not in written:
                raise IntegrityError(f"{folder.name}: {name} was lost while it was written")
            if files[name] != written[name].num_bytes:
                raise IntegrityError(f"{folder.name}: {name} was cut while it was written")
        content = {
            "step": folder.step,
            "world_size": self._group.rank_info.world,
            "incarnation": folder.incarnation,
            "libraries": libraries(),
            "files": {
                name: {"num_bytes": file.num_bytes, "blake3": file.digest}
                for name, file in written.items()
            },
        }
        data = json.dumps(content).encode()
        self._storage.commit(folder.name, META, data)
        return digest_of(data)

    def _replaced(self, other: CheckpointFolder, own: CheckpointFolder) -> bool:
        return other.step == own.step and other.incarnation > own.incarnation

    def clean_up(self, *, newest: int, retained: Collection[int] = ()) -> None:
        """Rank 0, once the ledger knows the newest: remove old, unfinished and abandoned ones.

        The newest `keep` stay, and those of the steps `retained`.
        """
        listed = self._storage.folders()
        found = (folder for folder in sorted(self._complete(listed)) if folder.step <= newest)
        complete = {folder.step: folder for folder in found}
        steps = {*sorted(complete)[-self._keep :], *retained}
        kept = [complete[step] for step in steps if step in complete]
        for folder in folders_in(listed):
            if folder not in kept and folder.incarnation <= self._incarnation:
                self._try_to_remove(folder)

    def _try_to_remove(self, folder: CheckpointFolder) -> None:
        """Remove a checkpoint that is never loaded again; one that cannot be removed may stay."""
        try:
            self._storage.remove(folder.name, first=META)
        except UnavailableError as error:
            log.warning("checkpoint not removed", error=error)


def libraries() -> dict[str, str]:
    """Versions of what computes, for whoever wants to do the same again."""
    found = {"paceline": __version__}
    for name in ("torch", "transformers", "peft", "safetensors"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
