"""Copies a checkpoint to another job: whole and the one that was meant, or not at all.

The index of a checkpoint, which lists its files with their sizes, is written last, and the ledger
has its digest. So it says which folder of a step is meant, and whether a copy is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.digest import digest_of
from paceline.errors import NotFoundError, UnavailableError
from paceline.files import sync

_INDEX = "paceline.json"
Stopped = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class CheckpointCopy:
    """What is copied: `digest` is that of the index; empty: an earlier release has written it."""

    to: str  # id of a job
    step: int
    digest: str


def copy_folder(jobs: Path, job_id: str, copy: CheckpointCopy, stopped: Stopped) -> None:
    """Copy between folders of jobs, with hard links where the file system has them.

    A folder gets its name when it is whole.

    Raises:
        NotFoundError, UnavailableError: as for `JobFiles.copy_checkpoint`.
    """
    source, target = (jobs / each / "checkpoints" for each in (job_id, copy.to))
    found = False
    for folder in sorted(source.glob(_pattern(copy))):
        sizes = _sizes(_content(folder / _INDEX), copy)
        if sizes is None:
            continue
        found = True
        if (target / folder.name).exists():
            continue
        draft = target / f"draft-{folder.name}"
        try:
            _link(folder, draft, stopped)
            there = {path: (draft / path).stat().st_size for path in _names(draft)}
            _check(sizes, there, folder.name)
            draft.rename(target / folder.name)
            sync(target)
        except FileNotFoundError as error:
            raise _gone(job_id, copy) from error
        except OSError as error:
            raise UnavailableError(f"checkpoint {copy.step} of {job_id}: {error}") from error
    if not found:
        raise _gone(job_id, copy)


def copy_stored(fs: Any, root: str, job_id: str, copy: CheckpointCopy, stopped: Stopped) -> None:
    """Copy in an object store of fsspec, where `root` has the folders of jobs; the index last.

    Raises:
        NotFoundError, UnavailableError, OSError: as for `JobFiles.copy_checkpoint`.
    """
    fs.invalidate_cache()  # another process writes there
    found = False
    for folder in fs.glob(f"{root}/{job_id}/checkpoints/{_pattern(copy)}"):
        name = str(folder).rstrip("/").rpartition("/")[2]
        target = f"{root}/{copy.to}/checkpoints/{name}"
        try:
            sizes = _sizes(fs.cat_file(f"{folder}/{_INDEX}"), copy)
            if sizes is None:
                continue
            for file in (*sizes, _INDEX):
                _go_on(stopped)
                fs.makedirs(f"{target}/{file}".rpartition("/")[0], exist_ok=True)
                fs.copy(f"{folder}/{file}", f"{target}/{file}")
        except FileNotFoundError:
            continue  # removed since it was listed
        fs.invalidate_cache()
        listed: Mapping[str, Any] = fs.find(target, detail=True)
        there = {str(path).partition(f"/{name}/")[2]: each["size"] for path, each in listed.items()}
        _check(sizes, there, name)
        found = True
    if not found:
        raise _gone(job_id, copy)


def _pattern(copy: CheckpointCopy) -> str:
    return f"step-{copy.step:06d}.*"


def _content(index: Path) -> bytes:
    """Empty: there is none."""
    try:
        return index.read_bytes()
    except OSError:
        return b""


def _sizes(index: bytes, copy: CheckpointCopy) -> dict[str, int] | None:
    """Bytes of each file by its index; None: the folder is not whole, or not the one to copy."""
    if copy.digest and digest_of(index) != copy.digest:
        return None
    try:
        files = json.loads(index)["files"]
        return {str(name): int(each["num_bytes"]) for name, each in files.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _check(expected: Mapping[str, int], there: Mapping[str, int], name: str) -> None:
    for file, num_bytes in expected.items():
        if there.get(file) != num_bytes:
            found = there.get(file, "no")
            raise UnavailableError(
                f"the copy of {name}/{file} has {found} bytes instead of {num_bytes}"
            )


def _names(folder: Path) -> list[str]:
    return [str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()]


def _link(source: Path, target: Path, stopped: Stopped) -> None:
    """Give each file, which is never written again, a second name, or else copy it."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in _names(source):
        _go_on(stopped)
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / name, target / name)
        except FileNotFoundError:
            raise
        except OSError:  # no hard links here
            shutil.copy2(source / name, target / name)
            sync(target / name)


def _go_on(stopped: Stopped) -> None:
    if stopped():
        raise UnavailableError("copying was stopped")


def _gone(job_id: str, copy: CheckpointCopy) -> NotFoundError:
    return NotFoundError(f"checkpoint {copy.step} of {job_id} is not there any more")
