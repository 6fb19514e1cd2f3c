"""Opens files below folders, following no link on the way.

Paths are made real first, and then opened one component after the other with `O_NOFOLLOW`: a link
that somebody puts there in between is an error. So links that the kernel resolves by itself, as
those of `/proc/PID/root`, lead nowhere else than their text says.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from paceline.errors import InvalidError

PRIVATE = ".paceline-private"
"""A file that says: what is in this folder belongs to Paceline, and no job may name it."""
# The others are in run directories of releases that did not write the first.
_MARKS = (PRIVATE, "up.lock", "controller.lock")
_OF_KERNEL = ("/proc", "/sys", "/dev")
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags of `open_beneath` for a folder whose names are to be read."""
_PLACE = getattr(os, "O_PATH", os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


def mark_private(folder: Path) -> None:
    """Keep jobs from naming what is in a folder, if this process may write there."""
    with suppress(OSError):
        (folder / PRIVATE).touch(mode=0o600)


def open_beneath(
    root: str | int, path: str, *, flags: int = _READ, check: Callable[[int], None] | None = None
) -> int:
    """Descriptor of a file below a folder; no component of `path` may be a link or `..`.

    `root`: a folder, or its descriptor, which stays open. `flags`: of `open`, which should have
    `O_NOFOLLOW` and `O_CLOEXEC`. `check` is called with a descriptor of each folder on the way.

    Raises:
        OSError: with ELOOP or ENOTDIR for a link.
    """
    parts = PurePosixPath(path).parts
    if ".." in parts or path.startswith("/"):
        raise OSError(errno.EINVAL, "leads outside of its folder", path)
    if not parts:
        return os.open(".", flags, dir_fd=root) if isinstance(root, int) else os.open(root, flags)
    at = os.dup(root) if isinstance(root, int) else os.open(root, _PLACE)
    try:
        for part in parts[:-1]:
            if check is not None:
                check(at)
            below = os.open(part, _PLACE | os.O_DIRECTORY, dir_fd=at)
            os.close(at)
            at = below
        if check is not None:
            check(at)
        return os.open(parts[-1], flags, dir_fd=at)
    finally:
        os.close(at)


def open_regular(root: str | int, path: str) -> int:
    """As `open_beneath`, to read a regular file.

    Raises:
        OSError: also for anything but a regular file.
    """
    opened = open_beneath(root, path)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "is no regular file", path)
    return opened


@dataclass(frozen=True, slots=True)
class ReadableFolders:
    """Folders, or single files, below which a job may name files."""

    roots: tuple[str, ...]
    shared: bool = True
    """Whether there may be files of others: private folders and hard links are refused then."""
    outside: str = "is a link to outside of the data of the job"
    """What is said of any other path."""
    are_real: bool = False
    """Whether `roots` are without links; one that is a link after all has no files then."""

    def real(self, path: str | Path, name: str) -> str:
        """The path without links; it need not exist. `name`: for messages.

        Raises:
            InvalidError: it is not below one of the folders, or is in a private one.
            OSError: it cannot be looked up.
        """
        real, root = self._place(path, name)
        with suppress(FileNotFoundError, NotADirectoryError):
            os.close(self._opened(real, root, name, _PLACE))
        return real

    def open(self, path: str | Path, name: str) -> BinaryIO:
        """A regular file, to be read.

        Raises:
            InvalidError: as `real`; or it is no regular file, or a hard link.
            OSError: it cannot be opened.
        """
        real, root = self._place(path, name)
        opened = self._opened(real, root, name, _READ)
        about = os.fstat(opened)
        is_file = stat.S_ISREG(about.st_mode)
        if is_file and not (self.shared and about.st_nlink > 1):
            return os.fdopen(opened, "rb")
        os.close(opened)
        if is_file:
            raise InvalidError(
                f"{name}: is a hard link, whose other names may be those of somebody else's file; "
                "make a copy (cp)"
            )
        raise InvalidError(f"{name}: is no regular file")

    def names(self, path: str | Path, name: str) -> Iterator[str]:
        """Relative paths of all files below a folder, without following links to folders.

        Raises as `real`.
        """
        real, root = self._place(path, name)
        folder = self._opened(real, root, name, FOLDER)
        try:
            for parent, _, files, at in os.fwalk(".", dir_fd=folder):
                for each in files:
                    with suppress(OSError):  # a link to nowhere
                        if stat.S_ISREG(os.stat(each, dir_fd=at).st_mode):
                            yield os.path.normpath(os.path.join(parent, each))
        finally:
            os.close(folder)

    def _place(self, path: str | Path, name: str) -> tuple[str, str]:
        """Path and root, both without links."""
        real = os.path.realpath(path)
        for root in self.roots if self.are_real else map(os.path.realpath, self.roots):
            if _is_below(real, root):
                for each in _OF_KERNEL:
                    if _is_below(real, each) and not _is_below(root, each):
                        raise InvalidError(f"{name}: is in {each}, which no job may read")
                return real, root
        raise InvalidError(f"{name}: {self.outside}")

    def _opened(self, real: str, root: str, name: str, flags: int) -> int:
        def check(folder: int) -> None:
            if self.shared and is_private(folder):
                raise InvalidError(
                    f"{name}: is in a run directory or cache of Paceline, where files of all jobs "
                    "are; copy what you need elsewhere, or send it with the job"
                )

        try:
            opened = open_beneath(root, os.path.relpath(real, root), flags=flags, check=check)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise InvalidError(f"{name}: was replaced by a link while it was opened") from None
            raise
        try:
            if stat.S_ISDIR(os.fstat(opened).st_mode):
                check(opened)
        except InvalidError:
            os.close(opened)
            raise
        return opened


def is_of_kernel(path: str | Path) -> bool:
    """Whether a path means something of the kernel's file systems, or of shared memory."""
    real = os.path.realpath(path)
    return any(_is_below(real, each) for each in _OF_KERNEL)


def is_private(folder: int) -> bool:
    """Whether the folder of a descriptor belongs to Paceline."""
    return any(_exists(each, folder) for each in _MARKS)


def _exists(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except (FileNotFoundError, PermissionError):
        return False
    return True


def _is_below(path: str, folder: str) -> bool:
    return PurePosixPath(path).is_relative_to(folder)
