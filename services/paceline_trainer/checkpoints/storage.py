"""Storage of checkpoints: a local folder or an object store, by fsspec URL."""

from __future__ import annotations

import errno
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from paceline.errors import ConfigError, IntegrityError, UnavailableError
from paceline.platform.files import sync
from paceline.platform.object_stores import installing_store
from paceline_trainer.checkpoints.digests import DigestingStream, FileDigest, digest_of

Sizes = dict[str, int]


class Storage:
    """Folders of files. Files appear one by one; folders are never renamed."""

    def __init__(self, location: Path | str) -> None:
        """Raises `ConfigError` if no installed package supports such a URL.

        `local`: it is a folder of this machine.
        """
        location = str(location)
        try:
            fs, root = url_to_fs(location)
        except ImportError as error:
            mend = installing_store(location.partition("://")[0])
            raise ConfigError(f"storage: {location!r}: {error}; {mend}") from None
        except ValueError as error:
            raise ConfigError(f"storage: {location!r}: {error}") from None
        self._fs: Any = fs
        self._root = root.rstrip("/")
        self.local = isinstance(fs, LocalFileSystem)

    def path_of(self, folder: str) -> str:
        """Path or URL of a folder."""
        path = f"{self._root}/{folder}"
        return path if self.local else self._fs.unstrip_protocol(path)

    def folders(self) -> dict[str, Sizes]:
        """Sizes in bytes of all files, by folder and name.

        Raises:
            UnavailableError: the storage cannot be listed, which must not look like an empty one.
        """
        self._fs.invalidate_cache()
        found: dict[str, Sizes] = {}
        try:
            # `find` would silently skip what it cannot read.
            for _, _, files in self._fs.walk(self._root, detail=True, on_error=_unless_missing):
                for info in files.values():
                    path = info["name"].removeprefix(f"{self._root}/")
                    folder, _, file = path.partition("/")
                    found.setdefault(folder, {})[file] = info["size"]
        except OSError as error:
            path = self.path_of("")
            raise UnavailableError(f"storage: {path} cannot be listed: {error}") from error
        return found

    @contextmanager
    def create(self, folder: str, file: str) -> Generator[DigestingStream]:
        """Write a file, which is durable when the block ends; raises `OSError`."""
        path = f"{self._root}/{folder}/{file}"
        if self.local:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        with self._fs.open(path, "wb") as stream:
            yield DigestingStream(stream)
        if self.local:
            sync(Path(path))

    @contextmanager
    def open(self, folder: str, file: str) -> Generator[Any]:
        """A file to read and seek in; raises the errors of `digest`."""
        with self._reading(folder, file), self._fs.open(f"{self._root}/{folder}/{file}") as stream:
            yield stream

    def read(self, folder: str, file: str) -> bytes:
        """Content of a small file; raises the errors of `digest`."""
        with self._reading(folder, file):
            return self._fs.cat_file(f"{self._root}/{folder}/{file}")

    def digest(self, folder: str, file: str) -> FileDigest:
        """Size and digest of a file, which is read completely.

        Raises:
            FileNotFoundError: the file does not exist.
            IntegrityError: the disk has a read error.
            UnavailableError: the storage does not answer.
        """
        with self.open(folder, file) as stream:
            return digest_of(stream)

    def commit(self, folder: str, file: str, content: bytes) -> None:
        """Write a small file atomically, after all other files of the folder are durable."""
        path = f"{self._root}/{folder}/{file}"
        if not self.local:
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
            UnavailableError: not all of it could be removed.
        """
        for path in (f"{self._root}/{folder}/{first}", f"{self._root}/{folder}"):
            try:
                self._fs.rm(path, recursive=True)
            except FileNotFoundError:
                continue
            except OSError as error:
                path = self.path_of(folder)
                raise UnavailableError(f"storage: {path} cannot be removed: {error}") from error

    @contextmanager
    def _reading(self, folder: str, file: str) -> Generator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno == errno.EIO:
                raise IntegrityError(str(error)) from error
            raise UnavailableError(f"storage: {self.path_of(folder)}/{file}: {error}") from error


def _unless_missing(error: OSError) -> None:
    """Ignore folders that do not exist or have been removed; raise any other error."""
    if not isinstance(error, FileNotFoundError):
        raise error
