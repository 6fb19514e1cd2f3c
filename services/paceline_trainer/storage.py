"""Where checkpoints lie: a folder of this machine or an object store, by fsspec URL."""

from __future__ import annotations

import errno
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from paceline.errors import ConfigError, IntegrityError, UnavailableError
from paceline.files import sync
from paceline_trainer.digests import DigestWriter, Sealed, digest_of

Sizes = dict[str, int]


class Storage:
    """Folders of files, which appear one by one; nothing here needs a folder to be renamed."""

    def __init__(self, place: Path | str) -> None:
        """Raises `ConfigError` when nothing installed speaks to such a URL."""
        url = str(place)
        try:
            fs, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"storage: {url!r}: {error}") from None
        self._fs: Any = fs
        self._root = root.rstrip("/")
        self._local = isinstance(fs, LocalFileSystem)

    def where(self, folder: str) -> str:
        """Its path or URL."""
        path = f"{self._root}/{folder}"
        return path if self._local else self._fs.unstrip_protocol(path)

    def folders(self) -> dict[str, Sizes]:
        """All folders: names of their files and bytes of each; none where nothing was written.

        Raises:
            UnavailableError: they cannot be listed. Nobody may take that for an empty storage.
        """
        self._fs.invalidate_cache()
        found: dict[str, Sizes] = {}
        try:
            # `find` leaves out whatever it cannot read.
            for _, _, files in self._fs.walk(self._root, detail=True, on_error=_unless_missing):
                for about in files.values():
                    path = about["name"].removeprefix(f"{self._root}/")
                    folder, _, file = path.partition("/")
                    found.setdefault(folder, {})[file] = about["size"]
        except OSError as error:
            where = self.where("")
            raise UnavailableError(f"storage: {where} cannot be listed: {error}") from error
        return found

    def writer(self, folder: str) -> DigestWriter:
        """Writes the files of torch's distributed checkpoint."""
        # Elsewhere there is no file handle, and torch would flush all disks of this machine.
        return DigestWriter(self.where(folder), sync_files=self._local)

    def reader(self, folder: str) -> FsspecReader:
        """Reads what `writer` has written."""
        return FsspecReader(self.where(folder))

    def read(self, folder: str, file: str) -> bytes:
        """A small file; raises as `look`."""
        with self._reading(folder, file):
            return self._fs.cat_file(f"{self._root}/{folder}/{file}")

    def look(self, folder: str, file: str) -> Sealed:
        """What a file is now; all of it is read.

        Raises:
            FileNotFoundError: there is none.
            IntegrityError: the disk cannot read what it holds.
            UnavailableError: the storage does not answer.
        """
        with self._reading(folder, file), self._fs.open(f"{self._root}/{folder}/{file}") as stream:
            return digest_of(stream)

    def seal(self, folder: str, file: str, content: bytes) -> None:
        """Write a small file, whole or not at all, after all others have survived."""
        path = f"{self._root}/{folder}/{file}"
        if not self._local:
            self._fs.pipe_file(path, content)
            return
        draft = Path(f"{path}.draft")
        draft.write_bytes(content)
        sync(draft)
        draft.rename(path)
        for each in (draft.parent, draft.parent.parent):
            sync(each)

    def remove(self, folder: str, *, first: str) -> None:
        """Remove a folder, the file `first` before all others.

        Raises:
            UnavailableError: it is there still, whole or in part.
        """
        for path in (f"{self._root}/{folder}/{first}", f"{self._root}/{folder}"):
            try:
                self._fs.rm(path, recursive=True)
            except FileNotFoundError:
                continue
            except OSError as error:
                where = self.where(folder)
                raise UnavailableError(f"storage: {where} cannot be removed: {error}") from error

    @contextmanager
    def _reading(self, folder: str, file: str) -> Generator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno == errno.EIO:
                raise IntegrityError(str(error)) from error
            raise UnavailableError(f"storage: {self.where(folder)}/{file}: {error}") from error


def _unless_missing(error: OSError) -> None:
    """A folder that is not there, or not any more, has no files; any other error counts."""
    if not isinstance(error, FileNotFoundError):
        raise error
