"""Where the data of a job are, and which others it may read."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from paceline.data.build import META
from paceline.data.errors import UnreadError, of_os_error, raise_answer
from paceline.data.files import DataFile, find
from paceline.data.remote import check_url, identity
from paceline.data.shape import RowShape
from paceline.errors import InvalidError, UnavailableError
from paceline.isolation.calls import EndedError
from paceline.isolation.once import StoppedError, wait_once
from paceline.isolation.process import command
from paceline.platform.beneath import ReadableFolders, mark_private
from paceline.platform.digest import digest_of
from paceline.plugins.declared import Provided, provided

if TYPE_CHECKING:
    from paceline.data.rows import IndexedRows

EVERYWHERE = ("/", "s3://", "gs://", "gcs://", "abfs://", "az://", "hf://")
"""For one user's jobs: they may read what the services may, but for files of Paceline itself."""
_URL = "://"
_GIB = 1 << 30
_NEW = "new-"  # how folders are called whose index is being written


@dataclass(frozen=True, slots=True)
class JobData(Provided):
    """The data of a job, for the tasks of environments that read some.

    Indexes are kept in `cache`: whoever asks for the same rows finds them.
    """

    uploaded: str = ""
    """Folder or file that came with the job; empty: none."""
    allowed: Sequence[str] = ()
    """Folders and prefixes of URLs below which else it may read."""
    cache: str = field(default_factory=lambda: _default_cache())
    cache_bytes: int = 8 * _GIB
    """Of all indexes but those that are open and were deleted; at most half of it for one."""
    timeout_s: float = 600.0
    memory_bytes: int = 2 * _GIB
    """Address space of the process that reads a source."""
    options_field: str = "tasks.options"
    """The field of the job whose options ask for rows, for messages."""
    stopped: threading.Event = field(default_factory=threading.Event, compare=False)
    """Once it is set, nothing more is read, and what is being read is given up."""

    def rows(self, path: str, shape: RowShape, *, field: str = "path") -> IndexedRows:
        """The rows of a source; blocks until all have been read and checked once.

        `path`: a file, folder or pattern of the uploaded data if it is relative, else of this
        machine, or a URL; empty: all of the uploaded data. `field`: who names it, for messages.

        Raises:
            InvalidError: it is not allowed, or a row is wrong.
            MissingDataError: it is not there.
            UnreadError: it takes too long, or ends the process that reads it.
            UnavailableError: an object store does not answer, or a disk fails.
        """
        from paceline.data.rows import IndexedRows  # numpy: only where rows are read

        name = path or "data"
        with _errors(field, name):
            where = self._where(path)
            folder = Path(self.cache) / self._key(where, name, shape)
            if not (folder / META).is_file():
                self._make(where, name, shape, folder)
            os.utime(folder)
            return IndexedRows(folder, shape, name=name, folders=self._folders_of(where))

    def identity(self, path: str, shape: RowShape, *, field: str = "path") -> str:
        """What changes when the files of a source do, or what is made of them; raises as `rows`."""
        name = path or "data"
        with _errors(field, name):
            return self._key(self._where(path), name, shape)

    def as_json(self) -> dict[str, Any]:
        """For `from_json` in another process."""
        return {
            "uploaded": self.uploaded,
            "allowed": [*self.allowed],
            "cache": self.cache,
            "cache_bytes": self.cache_bytes,
            "timeout_s": self.timeout_s,
            "options_field": self.options_field,
            "memory_bytes": self.memory_bytes,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> JobData:
        """As `as_json` has made it."""
        return cls(**raw)

    def _key(self, where: str, name: str, shape: RowShape) -> str:
        made_from = [where, self._state(where, name), shape.model_dump(mode="json")]
        return digest_of(json.dumps(made_from, sort_keys=True).encode())

    def _state(self, where: str, name: str) -> object:
        """What changes when the content of a source does."""
        if _URL in where:
            return identity(where)
        found = find(Path(where), name, self._folders_of(where))
        return [[str(each.path), *_state_of(each)] for each in found]

    def _folders_of(self, where: str) -> ReadableFolders:
        """Where the files of a source may be that a path without links means."""
        root = os.path.realpath(self.uploaded) if self.uploaded else ""
        if root and _is_below(where, root):
            return ReadableFolders((root,), shared=False)
        folders = tuple(each for each in self.allowed if _URL not in each)
        return ReadableFolders(folders, outside=self._refusal())

    def _where(self, path: str) -> str:
        """The path or URL that may be read."""
        if "\0" in path:
            raise InvalidError("a path with the character NUL is none")
        if _URL in path:
            check_url(path)
            if not any(_is_below(path, each) for each in self.allowed):
                raise InvalidError(f"{path}: {self._refusal()}")
            return path
        if path.startswith("/"):
            return self._folders_of(os.path.realpath(path)).real(path, path)
        return str(self._in_upload(path))

    def _refusal(self) -> str:
        listed = ", ".join(self.allowed) or "none"
        return (
            "jobs of this installation may not read it; allowed are files that come with the job "
            f"(`paceline submit --data`), and these folders and prefixes: {listed}; an operator "
            "adds some with `paceline up --data-folder` or `data_folders` of experience"
        )

    def _in_upload(self, path: str) -> Path:
        if not self.uploaded:
            raise InvalidError(
                f"{path or 'no path'}: means data that come with the job, and none do; name them "
                "in `data.path`, submit with --data, or write a whole path or URL"
            )
        root = Path(os.path.realpath(self.uploaded))
        if root.is_file():
            if path not in ("", ".", root.name):
                raise InvalidError(f"{path}: the data of the job are the file {root.name}")
            return root
        found = Path(os.path.realpath(root / path))
        if not found.is_relative_to(root):
            raise InvalidError(f"{path}: is outside of the data of the job")
        return found

    def _make(self, where: str, name: str, shape: RowShape, folder: Path) -> None:
        """Write an index, in a process of its own, or find that somebody else has."""
        Path(self.cache).mkdir(parents=True, exist_ok=True, mode=0o700)
        mark_private(Path(self.cache))
        with tempfile.TemporaryDirectory(dir=self.cache, prefix=_NEW) as made:
            self._make_room()
            into = Path(made) / "index"
            into.mkdir()
            request = {
                "path": where,
                "name": name,
                "folders": asdict(self._folders_of(where)),
                "shape": shape.model_dump(mode="json"),
                "into": str(into),
                "spool_bytes": self.cache_bytes // 2,
                "memory_bytes": self.memory_bytes,
            }
            raise_answer(self._ask(request, name))
            with suppress(OSError):  # somebody else was faster
                into.rename(folder)

    def _ask(self, request: Mapping[str, Any], name: str) -> list[str]:
        """What the process that reads a source answers."""
        reader = command("paceline.data.index_child")
        try:
            answer = wait_once(
                reader, "index", request, timeout_s=self.timeout_s, stopped=self.stopped
            )
        except TimeoutError:
            raise UnreadError(f"{name}: could not be read within {self.timeout_s:g} s") from None
        except StoppedError:
            raise UnavailableError(f"{name}: this service is about to end") from None
        except EndedError as error:
            text = f"{name}: the process that read it has ended with {error.how}"
            raise UnreadError(text) from None
        return list(map(str, answer.fields["wrong"]))

    def _make_room(self) -> None:
        """Delete the indexes that nobody has asked for for longest; open ones stay readable."""
        found = {each: each.stat().st_mtime for each in Path(self.cache).iterdir() if each.is_dir()}
        new = [each for each in found if each.name.startswith(_NEW)]
        since = time.time() - self.timeout_s  # older ones are of processes that were killed
        building = sum(found[each] >= since for each in new)
        sizes = {each: _bytes_in(each) for each in found if each not in new}
        total = sum(sizes.values())
        for each in sorted(sizes, key=lambda folder: found[folder]):
            if total <= self.cache_bytes - building * (self.cache_bytes // 2):
                return
            shutil.rmtree(each, ignore_errors=True)
            total -= sizes[each]


def takes_data(make: Callable[..., Any]) -> str:
    """The parameter of a factory that is annotated as `JobData`; empty: it has none."""
    return provided(make, JobData)


def _default_cache() -> str:
    return str(Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}-data")


def _is_below(found: str, allowed: str) -> bool:
    """Whether a path, or a URL without `..`, is below a folder or a prefix."""
    path = PurePosixPath(found)
    if _URL in found:
        return _URL in allowed and found.startswith(allowed) and ".." not in path.parts
    return _URL not in allowed and path.is_relative_to(allowed)


def _state_of(file: DataFile) -> tuple[int, int, int]:
    """Size, time of the last change in nanoseconds, and inode."""
    with file.open() as opened:
        found = os.fstat(opened.fileno())
    return found.st_size, found.st_mtime_ns, found.st_ino


def _bytes_in(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())


@contextmanager
def _errors(field: str, name: str) -> Generator[None]:
    """Begin messages with the field that names a source."""
    try:
        yield
    except (InvalidError, UnavailableError) as error:
        raise type(error)(f"{field}: {error.message}") from None
    except OSError as error:
        raise of_os_error(f"{field}: {name}", error) from None
