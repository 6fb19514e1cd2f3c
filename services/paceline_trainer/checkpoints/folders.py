"""The folders of a job's checkpoints: which are complete, and what is in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import IntegrityError, NotFoundError
from paceline.platform.digest import digest_of
from paceline_trainer.checkpoints.digests import FileDigest
from paceline_trainer.checkpoints.storage import Sizes, Storage

META = "paceline.json"
_NAME = re.compile(r"step-(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointFolder:
    """`step-000040.2`: written by incarnation 2 after 40 steps, and by no other one."""

    step: int
    incarnation: int

    @property
    def name(self) -> str:
        """Name in the storage."""
        return f"step-{self.step:06d}.{self.incarnation}"


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A complete checkpoint of a job, which need not be that of the caller."""

    storage: Storage
    folder: CheckpointFolder
    files: Mapping[str, FileDigest]
    """As `paceline.json` lists them, by name; the content is not compared yet."""

    @property
    def path(self) -> str:
        """Path or URL."""
        return self.storage.path_of(self.folder.name)

    def verify(self) -> None:
        """Read and compare every file.

        Raises:
            IntegrityError: one is missing or damaged; the message names it.
            UnavailableError: the storage does not answer.
        """
        for name, recorded in self.files.items():
            if problem := difference(self.storage, self.folder, name, recorded):
                raise IntegrityError(problem)


def checkpoints_of(base: str, job_id: str) -> str:
    """Folder or URL of a job's checkpoints; `base`: the storage or run directory of its trainer."""
    return f"{base}/jobs/{job_id}/checkpoints"


def saved_checkpoint(base: str, job_id: str, *, step: int, digest: str = "") -> SavedCheckpoint:
    """The checkpoint of a step of any job; which step is best or latest is in the job's status.

    `base`: the storage of the installation, or the run directory if it has none. `digest`: SHA-256
    of its `paceline.json` as the job's status has it; if empty, the newest incarnation's.

    Raises:
        NotFoundError: there is none; the message names the steps that exist.
        IntegrityError: none of this step has that digest, or a file is missing or cut.
        UnavailableError: the storage cannot be read.
    """
    storage = Storage(checkpoints_of(base, job_id))
    listed = storage.folders()
    found = sorted(each for each in folders_in(listed) if META in listed[each.name])
    of_step = [each for each in found if each.step == step]
    if not of_step:
        steps = ", ".join(str(each) for each in sorted({each.step for each in found})) or "none"
        raise NotFoundError(f"job {job_id} has no checkpoint of step {step}; there are: {steps}")
    problem = ""
    for folder in reversed(of_step):
        try:
            files = recorded_files(storage, folder, digest or None)
            if not (problem := size_problem(folder, files, listed[folder.name])):
                return SavedCheckpoint(storage, folder, files)
        except IntegrityError as error:
            problem = error.message
    raise IntegrityError(f"job {job_id}: {problem}")


def folders_in(listed: Mapping[str, Sizes]) -> Iterator[CheckpointFolder]:
    """Those among all folders of a storage that are named like checkpoints."""
    matches = (_NAME.fullmatch(name) for name in listed)
    return (CheckpointFolder(int(m[1]), int(m[2])) for m in matches if m)


def recorded_files(
    storage: Storage, folder: CheckpointFolder, digest: str | None = None
) -> dict[str, FileDigest]:
    """The files in the folder's `paceline.json`, which must have this digest if one is given.

    Raises:
        IntegrityError: it is damaged, replaced or cannot be read.
        UnavailableError: the storage does not answer.
    """
    name = f"{folder.name}/{META}"
    try:
        content = storage.read(folder.name, META)
    except FileNotFoundError:  # removed since it was listed
        raise IntegrityError(f"{name} is missing") from None
    except IntegrityError as error:
        raise IntegrityError(f"{name} cannot be read: {error}") from error
    try:
        files = json.loads(content)["files"]
        found = {name: _digest_from_json(value) for name, value in files.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise IntegrityError(f"{name} is damaged: {cause}") from error
    if digest is not None and digest_of(content) != digest:
        raise IntegrityError(f"{name} is not the one that the ledger knows")
    return found


def size_problem(folder: CheckpointFolder, recorded: Mapping[str, FileDigest], files: Sizes) -> str:
    """A problem that is visible without reading the files; empty if there is none."""
    for name, file in recorded.items():
        if name not in files:
            return f"{folder.name}/{name} is missing"
        if files[name] != file.num_bytes:
            return f"{folder.name}/{name} has {files[name]} bytes instead of {file.num_bytes}"
    return ""


def difference(storage: Storage, folder: CheckpointFolder, name: str, recorded: FileDigest) -> str:
    """How a file differs from what was written; empty if it does not.

    Raises:
        UnavailableError: the storage does not answer.
    """
    path = f"{folder.name}/{name}"
    try:
        found = storage.digest(folder.name, name)
    except FileNotFoundError:
        return f"{path} is missing"
    except IntegrityError as error:
        return f"{path} cannot be read: {error}"
    if found == recorded:
        return ""
    expected, actual = recorded.digest[:12], found.digest[:12]
    return f"{path} is not as it was written: blake3 {actual}… instead of {expected}…"


def _digest_from_json(value: Any) -> FileDigest:
    """A file's entry in `paceline.json`."""
    return FileDigest(int(value["num_bytes"]), str(value["blake3"]))
