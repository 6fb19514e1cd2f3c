"""Copies a checkpoint to another job: whole and the one that was meant, or not at all.

The index of a checkpoint, which lists its files with their sizes, is written last, and the ledger
has its digest. So it says which folder of a step is meant, and whether a copy is whole. A trainer
writes these folders: what the index does not list stays there, and no link is followed.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from paceline.errors import NotFoundError, UnavailableError
from paceline.platform.beneath import FOLDER, open_beneath, open_regular
from paceline.platform.digest import digest_of
from paceline.platform.files import sync

_INDEX = "paceline.json"
_INDEX_BYTES = 16 << 20
_BLOCK_BYTES = 8 << 20
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
    target = jobs / copy.to / "checkpoints"
    found = False
    try:
        source = open_beneath(str(jobs), f"{job_id}/checkpoints", flags=FOLDER)
    except OSError as error:
        raise _gone(job_id, copy) from error
    try:
        for name in sorted(fnmatch.filter(os.listdir(source), _pattern(copy))):
            index = _content(source, name)
            sizes = _sizes(index, copy)
            if sizes is None:
                continue
            found = True
            if not (target / name).exists():
                _copy_whole(source, target, name, sizes, index, stopped)
    except FileNotFoundError as error:
        raise _gone(job_id, copy) from error
    except OSError as error:
        raise UnavailableError(f"checkpoint {copy.step} of {job_id}: {error}") from error
    finally:
        os.close(source)
    if not found:
        raise _gone(job_id, copy)


def _copy_whole(
    source: int,
    target: Path,
    name: str,
    sizes: Mapping[str, int],
    index: bytes,
    stopped: Stopped,
) -> None:
    """Copy the listed files of a folder below `source`, a descriptor, and their index last."""
    draft = target / f"draft-{name}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for file, num_bytes in sizes.items():
        _go_on(stopped)
        opened = open_regular(source, f"{name}/{file}")
        try:
            _check({file: num_bytes}, {file: os.fstat(opened).st_size}, name)
            (draft / file).parent.mkdir(parents=True, exist_ok=True)
            _link(opened, draft / file)
        finally:
            os.close(opened)
    (draft / _INDEX).write_bytes(index)  # what was compared with the ledger
    sync(draft / _INDEX)
    _check(sizes, {file: (draft / file).stat().st_size for file in sizes}, name)
    draft.rename(target / name)
    sync(target)


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


def _content(source: int, folder: str) -> bytes:
    """The index of a folder; empty: there is none, or it is too large."""
    try:
        with os.fdopen(open_regular(source, f"{folder}/{_INDEX}"), "rb") as index:
            found = index.read(_INDEX_BYTES + 1)
    except OSError:
        return b""
    return found if len(found) <= _INDEX_BYTES else b""


def _sizes(index: bytes, copy: CheckpointCopy) -> dict[str, int] | None:
    """Bytes of each file by its index; None: the folder is not whole, or not the one to copy."""
    if copy.digest and digest_of(index) != copy.digest:
        return None
    try:
        files = json.loads(index)["files"]
        sizes = {str(name): int(each["num_bytes"]) for name, each in files.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return sizes if all(map(_is_inside, sizes)) else None


def _is_inside(name: str) -> bool:
    """Whether a name of an index is that of a file in its folder, and not of the index."""
    parts = PurePosixPath(name).parts
    inside = parts and ".." not in parts and not name.startswith("/") and "\0" not in name
    return bool(inside) and name != _INDEX


def _check(expected: Mapping[str, int], there: Mapping[str, int], name: str) -> None:
    for file, num_bytes in expected.items():
        if there.get(file) != num_bytes:
            found = there.get(file, "no")
            raise UnavailableError(
                f"the copy of {name}/{file} has {found} bytes instead of {num_bytes}"
            )


def _link(opened: int, target: Path) -> None:
    """Give an open file, which is never written again, a second name, or else copy it."""
    try:
        os.link(f"/proc/self/fd/{opened}", target, src_dir_fd=opened, follow_symlinks=True)
    except OSError:  # no hard links here
        with os.fdopen(os.dup(opened), "rb") as source, target.open("xb") as copy:
            shutil.copyfileobj(source, copy, _BLOCK_BYTES)
        sync(target)


def _go_on(stopped: Stopped) -> None:
    if stopped():
        raise UnavailableError("copying was stopped")


def _gone(job_id: str, copy: CheckpointCopy) -> NotFoundError:
    return NotFoundError(f"checkpoint {copy.step} of {job_id} is not there any more")
