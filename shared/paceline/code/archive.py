"""The archive of a job's code: a zip file that is the same for the same files."""

from __future__ import annotations

import io
import os
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from pathspec import GitIgnoreSpec

from paceline.code.requirements import MAX_BYTES, REQUIREMENTS, parse
from paceline.config.quota import MAX_CODE_BYTES
from paceline.digest import digest_of
from paceline.errors import ConfigError, IntegrityError, InvalidError, UnavailableError

IGNORE_FILE = ".gitignore"
ALWAYS_IGNORED = (".git/", "__pycache__/", "*.pyc", ".venv/", "venv/", "node_modules/", ".DS_Store")
MAX_FILES = 2000
MAX_UNPACKED_BYTES = 4 * MAX_CODE_BYTES
_MOST_NAME = 255  # bytes of a file or folder
_EPOCH = (1980, 1, 1, 0, 0, 0)
_BROKEN = (zipfile.BadZipFile, zlib.error, NotImplementedError, ValueError, RuntimeError, EOFError)


def pack(folder: Path) -> bytes:
    """Pack a folder, without what its `.gitignore` and `ALWAYS_IGNORED` leave out.

    Raises:
        ConfigError: it is no folder, is too large, or has links or devices.
        InvalidError: its requirements are wrong.
    """
    if not folder.is_dir():
        raise ConfigError(f"code.path: {folder} is not a folder")
    try:
        files = sorted(_files(folder))
        if not files:
            raise ConfigError(f"code.path: {folder} has no files")
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in files:
                info = zipfile.ZipInfo(name, _EPOCH)
                info.external_attr = 0o644 << 16
                info.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(info, (folder / name).read_bytes())
    except OSError as error:
        raise ConfigError(f"code.path: {error.filename or folder}: {error.strerror}") from None
    if packed.tell() > MAX_CODE_BYTES:
        raise ConfigError(f"code.path: {folder}: {_too_large(packed.tell(), MAX_CODE_BYTES)}")
    if REQUIREMENTS in files:
        parse((folder / REQUIREMENTS).read_bytes())
    return packed.getvalue()


def check(archive: bytes) -> list[str]:
    """The names of the files of an archive that can be unpacked.

    Raises:
        InvalidError: it is none, has paths outside, links, or too much in it, or requirements that
            are wrong.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as opened:
            names = [info.filename for info in _checked(opened)]
            if REQUIREMENTS in names:
                with opened.open(REQUIREMENTS) as source:
                    parse(source.read(MAX_BYTES + 1))
            return names
    except _BROKEN as error:
        raise InvalidError(f"code: not a zip archive: {error}") from None


def unpack(archive: bytes, digest: str, into: Path) -> Path:
    """The folder `into/digest` with the files, which nobody can write.

    Raises:
        IntegrityError: the archive has another digest.
        InvalidError: as `check`.
    """
    target = into / digest
    if target.is_dir():
        return target
    if digest_of(archive) != digest:
        raise IntegrityError(f"code: the archive of {digest} has another digest")
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as name:
        folder = Path(name) / digest
        folder.mkdir()
        _extract(archive, folder)
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():  # else somebody else has unpacked it
                raise
    return target


def _extract(archive: bytes, folder: Path) -> None:
    left = MAX_UNPACKED_BYTES
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as opened:
            for info in _checked(opened):
                path = folder / info.filename
                path.parent.mkdir(parents=True, exist_ok=True)
                with opened.open(info) as source:
                    data = source.read(left + 1)  # its header may lie
                if len(data) > left:
                    raise InvalidError(f"code: {_too_large(len(data), MAX_UNPACKED_BYTES)}")
                left -= len(data)
                path.write_bytes(data)
                path.chmod(0o444)
    except OSError as error:
        raise UnavailableError(f"code: cannot be unpacked here: {error.strerror}") from None
    except _BROKEN as error:
        raise InvalidError(f"code: not a zip archive: {error}") from None
    for path in (folder, *(each for each in folder.rglob("*") if each.is_dir())):
        path.chmod(0o755)  # so that the user of the sandbox may read it


def _files(folder: Path) -> Iterator[str]:
    """Names of the files to pack."""
    ignore = folder / IGNORE_FILE
    lines = ignore.read_text(errors="replace").splitlines() if ignore.is_file() else []
    ignored = GitIgnoreSpec.from_lines([*ALWAYS_IGNORED, *lines])
    count = total = 0
    for parent, folders, names in os.walk(folder):
        inside = Path(parent).relative_to(folder)
        folders[:] = [each for each in folders if not ignored.match_file(f"{inside / each}/")]
        for each in [*folders, *names]:
            path, name = Path(parent) / each, (inside / each).as_posix()
            if ignored.match_file(name) or (path.is_dir() and not path.is_symlink()):
                continue
            found = path.lstat()
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"code.path: {path} is not a file; links are not followed")
            count, total = count + 1, total + found.st_size
            if count > MAX_FILES:
                raise ConfigError(f"code.path: {folder} has more than {MAX_FILES} files")
            if total > MAX_UNPACKED_BYTES:
                text = _too_large(total, MAX_UNPACKED_BYTES)
                raise ConfigError(f"code.path: {folder}: at {path}: {text}")
            yield name


def _checked(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    infos = [info for info in archive.infolist() if not info.is_dir()]
    if not 0 < len(infos) <= MAX_FILES:
        raise InvalidError(f"code: {len(infos)} files; from 1 to {MAX_FILES} are allowed")
    if (total := sum(info.file_size for info in infos)) > MAX_UNPACKED_BYTES:
        raise InvalidError(f"code: {_too_large(total, MAX_UNPACKED_BYTES)}")
    seen = set[str]()
    for info in infos:
        path = PurePosixPath(info.filename)
        kind = stat.S_IFMT(info.external_attr >> 16)
        inside = not path.is_absolute() and ".." not in path.parts and path.as_posix() != "."
        plain = kind in (0, stat.S_IFREG) and not info.flag_bits & 1
        plain = plain and info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        plain = plain and all(len(part.encode()) <= _MOST_NAME for part in path.parts)
        if not (inside and plain and path.as_posix() == info.filename) or "\\" in info.filename:
            raise InvalidError(f"code: {info.filename[:200]!r} is not a plain file inside")
        if info.filename in seen:
            raise InvalidError(f"code: {info.filename[:200]!r} is there twice")
        seen.add(info.filename)
    for name in seen:
        for parent in PurePosixPath(name).parents:
            if parent.as_posix() in seen:
                raise InvalidError(f"code: {str(parent)[:200]!r} is a file and a folder")
    return infos


def _too_large(found: int, most: int) -> str:
    return f"{found} bytes; at most {most} are allowed, and large files belong on the volume"
