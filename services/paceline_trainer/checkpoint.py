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
from paceline.logs import Log
from paceline_trainer.digests import Sealed
from paceline_trainer.distributed import Group
from paceline_trainer.model import Policy
from paceline_trainer.optimizer import Optimizer
from paceline_trainer.storage import Sizes, Storage

META = "paceline.json"
log = Log("checkpoints")
_NAME = re.compile(r"step-(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class _Folder:
    """`step-000040.2`: what incarnation 2 wrote after 40 steps. Nobody else writes there."""

    step: int
    incarnation: int

    @property
    def name(self) -> str:
        return f"step-{self.step:06d}.{self.incarnation}"


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that can be loaded (step 0: none), and what is wrong with newer ones."""

    step: int
    damaged: tuple[str, ...] = ()


class Checkpoints:
    """One folder for each step and incarnation, in a storage without renames or locks.

    `paceline.json` is written last and names all files with their sizes and digests. A checkpoint
    counts when these are all there: so neither a death while writing or removing, nor a replaced
    trainer that goes on writing while its folder is removed, leaves one that only looks whole. What
    was changed since it was written shows in the digests, which `find` compares.
    """

    def __init__(self, place: Path | str, *, group: Group, keep: int, incarnation: int = 0) -> None:
        self._storage = Storage(place)
        self._group = group
        self._keep = keep
        self._incarnation = incarnation
        self._sound: _Folder | None = None  # found so by `find`
        self._damaged: list[_Folder] = []  # passed over by `find`

    def path(self, step: int) -> str:
        """Where the newest checkpoint of a step lives.

        Raises:
            NotFoundError: there is none.
        """
        return self._storage.where(self._newest(step).name)

    def steps(self) -> list[int]:
        """Steps with a whole checkpoint, rising; raises `UnavailableError` if that is unknown."""
        return sorted({folder.step for folder in self._whole(self._storage.folders())})

    def kept(self, step: int) -> list[int]:
        """Steps up to `step` that can be gone back to, rising; raises as `steps`.

        The model that training began with counts as long as there are few.
        """
        return sorted({0, *(each for each in self.steps() if each <= step)})[-self._keep :]

    def find(self, *, most: int) -> Found:
        """Collective: the newest checkpoint up to rank 0's `most` that is as it was written.

        Each file is read once, by one of the ranks.

        Raises:
            UnavailableError: the storage cannot be read.
        """
        whole, damaged = self._candidates(most) if self._group.place.first else ([], [])
        self._sound, self._damaged = None, []
        while True:
            mine = whole.pop() if whole else _Folder(0, 0)
            step, incarnation = self._group.gather([mine.step, mine.incarnation])[0]
            folder = _Folder(int(step), int(incarnation))
            if not folder.step:
                break
            problems = self._compare(folder)
            if not problems:
                self._sound = folder
                break
            damaged += [(folder, problem) for problem in problems]
        newer = [(each, text) for each, text in damaged if each > folder]
        self._damaged = [each for each, _ in newer]
        return Found(folder.step, tuple(text for _, text in sorted(newer, reverse=True)))

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
        writer = self._storage.writer(folder.name)
        with _translated(folder.name):
            save(state, storage_writer=writer)
        written = self._group.gather_objects(writer.written())
        if self._group.place.first:
            self._finish(folder, {name: seal for each in written for name, seal in each.items()})
        self._group.barrier()
        return self._storage.where(folder.name)

    def load(self, step: int, policy: Policy, optimizer: Optimizer) -> None:
        """Collective: go back to the checkpoint of a step, whatever world size wrote it.

        The one that `find` has found, if it was of this step.

        Raises:
            NotFoundError: there is none.
            UnavailableError: the storage cannot be read.
        """
        sound = self._sound
        folder = sound if sound is not None and sound.step == step else self._newest(step)
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
        """Rank 0: remove checkpoints of a branch that the ledger has left, and damaged ones.

        Raises:
            UnavailableError: one that was left and could be taken for one of this branch stays.
        """
        for folder in _folders(self._storage.folders()):
            if folder.incarnation > self._incarnation:
                continue
            if folder in self._damaged:
                self._try_to_remove(folder)
            elif folder.step > step:
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
            if META in listed[folder.name] and not self._amiss(folder, listed[folder.name]):
                yield folder

    def _candidates(self, most: int) -> tuple[list[_Folder], list[tuple[_Folder, str]]]:
        """Those that look whole, the newest last; and what is wrong with others."""
        listed = self._storage.folders()
        whole: list[_Folder] = []
        damaged: list[tuple[_Folder, str]] = []
        for folder in sorted(_folders(listed)):
            files = listed[folder.name]
            if folder.step > most or META not in files:
                continue
            problem = self._amiss(folder, files)
            if problem:
                damaged.append((folder, problem))
            else:
                whole.append(folder)
        return whole, damaged

    def _amiss(self, folder: _Folder, files: Sizes) -> str:
        """What can be seen without reading the files; empty: nothing."""
        try:
            sealed = self._sealed(folder)
        except IntegrityError as error:
            return error.message
        for name, seal in sealed.items():
            if name not in files:
                return f"{folder.name}/{name} is missing"
            if files[name] != seal.num_bytes:
                return f"{folder.name}/{name} has {files[name]} bytes instead of {seal.num_bytes}"
        return ""

    def _compare(self, folder: _Folder) -> list[str]:
        """Collective: what is wrong with any file, as those who have read them tell."""
        mine: list[str] = []
        try:
            sealed = self._sealed(folder)
            by_size = sorted(sealed, key=lambda name: (-sealed[name].num_bytes, name))
            place = self._group.place
            mine = [self._differs(folder, n, sealed[n]) for n in by_size[place.rank :: place.world]]
        except IntegrityError as error:
            mine.append(error.message)
        told = self._group.gather_objects([text for text in mine if text])
        return list(dict.fromkeys(text for each in told for text in each))

    def _differs(self, folder: _Folder, name: str, seal: Sealed) -> str:
        """How a file differs from what was written; empty: it does not."""
        if not seal.digest:  # written by a release that took none
            return ""
        where = f"{folder.name}/{name}"
        try:
            found = self._storage.look(folder.name, name)
        except FileNotFoundError:
            return f"{where} is missing"
        except IntegrityError as error:
            return f"{where} cannot be read: {error}"
        if found == seal:
            return ""
        was, now = seal.digest[:12], found.digest[:12]
        return f"{where} is not as it was written: blake3 {now}… instead of {was}…"

    def _sealed(self, folder: _Folder) -> dict[str, Sealed]:
        """What its `paceline.json` names.

        Raises:
            IntegrityError: it is not as it was written, or cannot be read.
            UnavailableError: the storage does not answer.
        """
        try:
            files = json.loads(self._storage.read(folder.name, META))["files"]
            return {name: _seal(told) for name, told in files.items()}
        except FileNotFoundError:  # removed since it was listed
            raise IntegrityError(f"{folder.name}/{META} is missing") from None
        except IntegrityError as error:
            raise IntegrityError(f"{folder.name}/{META} cannot be read: {error}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            cause = f"{type(error).__name__}: {error}"
            raise IntegrityError(f"{folder.name}/{META} is damaged: {cause}") from error

    def _finish(self, folder: _Folder, written: dict[str, Sealed]) -> None:
        listed = self._storage.folders()
        if any(self._replaced(each, folder) for each in self._whole(listed)):
            raise FencedError(
                f"a newer incarnation has written the checkpoint of step {folder.step}"
            )
        files = listed.get(folder.name, {})
        metadata = self._storage.reader(folder.name).read_metadata()
        needed = {str(part.relative_path) for part in (metadata.storage_data or {}).values()}
        for name in sorted({*needed, *written}):
            if name not in files or name not in written:
                raise IntegrityError(f"{folder.name}: {name} was lost while it was written")
            if files[name] != written[name].num_bytes:
                raise IntegrityError(f"{folder.name}: {name} was cut while it was written")
        content = {
            "step": folder.step,
            "world_size": self._group.place.world,
            "incarnation": folder.incarnation,
            "files": {
                name: {"num_bytes": seal.num_bytes, "blake3": seal.digest}
                for name, seal in written.items()
            },
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
                self._try_to_remove(folder)

    def _try_to_remove(self, folder: _Folder) -> None:
        """What cannot be read often cannot be removed either, and nobody goes back to it."""
        try:
            self._storage.remove(folder.name, first=META)
        except UnavailableError as error:
            log.warning("a checkpoint stays", error=error)


def _folders(listed: dict[str, Sizes]) -> Iterator[_Folder]:
    matches = (_NAME.fullmatch(name) for name in listed)
    return (_Folder(int(m[1]), int(m[2])) for m in matches if m)


def _seal(told: Any) -> Sealed:
    """A file's line in `paceline.json`; a release that took no digests wrote the size alone."""
    if isinstance(told, int):
        return Sealed(told)
    return Sealed(int(told["num_bytes"]), str(told["blake3"]))


@contextmanager
def _translated(name: str) -> Generator[None]:
    """What torch gathers from all ranks is no `Exception`; the first of them leaves as ours."""
    try:
        yield
    except CheckpointException as error:
        rank, (first, _) = min(error.failures.items())
        text = f"{name}: rank {rank}: {type(first).__name__}: {first}"
        raise UnavailableError(text) from error
