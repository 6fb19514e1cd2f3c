"""The archive of a job's code: a zip file that is the same for the same files."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from pathspec import GitIgnoreSpec

from paceline.config.quota import GIB, MAX_CODE_BYTES
from paceline.errors import ConfigError, IntegrityError, InvalidError, UnavailableError
from paceline.isolation.code.members import BROKEN, opened, plain_members, too_large
from paceline.isolation.code.requirements import MAX_BYTES, REQUIREMENTS, parse
from paceline.platform.digest import digest_of_file

IGNORE_FILE = ".gitignore"
ALWAYS_IGNORED = (".git/", "__pycache__/", "*.pyc", ".venv/", "venv/", "node_modules/", ".DS_Store")
MAX_FILES = 2000
MAX_UNPACKED_BYTES = GIB
_BLOCK_BYTES = 1 << 20
_ALREADY_PACKED = (".parquet", ".gz", ".zst")
_LISTED_BYTES = 4 << 20
_EPOCH = (1980, 1, 1, 0, 0, 0)


def pack_data(path: Path, into: BinaryIO) -> str:
    """Pack data, a file or a folder, without `ALWAYS_IGNORED`; returns the archive's digest.

    Raises:
        ConfigError: as `data_files`.
    """
    root, files = data_files(path)
    try:
        return _packed(root, files, into, "data.path")
    except OSError as error:
        raise ConfigError(f"data.path: {error.filename or path}: {error.strerror}") from None


def data_files(path: Path) -> tuple[Path, list[str]]:
    """What data consist of: a folder, and the names of files in it.

    Raises:
        ConfigError: there is none, or it is too large, or has links or devices.
    """
    field = "data.path"
    if not path.exists():
        raise ConfigError(f"{field}: {path}: no such file or folder")
    try:
        if path.is_file():
            if (size := path.stat().st_size) > MAX_UNPACKED_BYTES:
                text = too_large(size, MAX_UNPACKED_BYTES)
                raise ConfigError(f"{field}: {path}: {text}")
            return path.resolve().parent, [path.resolve().name]
        files = sorted(_files(path, field, ignore_file=""))
    except OSError as error:
        raise ConfigError(f"{field}: {error.filename or path}: {error.strerror}") from None
    if not files:
        raise ConfigError(f"{field}: {path} has no files")
    return path, files


def pack(path: Path, into: BinaryIO) -> str:
    """Pack a Python file, or a folder without what its `.gitignore` and `ALWAYS_IGNORED` leave out.

    Returns the digest of the archive.

    Raises:
        ConfigError: there is none, it is no module, is too large, or has links or devices.
        InvalidError: its requirements are wrong.
    """
    if path.is_file():
        return _pack_module(path, into)
    if not path.is_dir():
        raise ConfigError(f"code.path: {path}: no such folder or Python file")
    return _pack_folder(path, into)


def _pack_module(path: Path, into: BinaryIO) -> str:
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise ConfigError(
            f"code.path: {path}: a file has to be a Python module that can be imported, such as "
            "scoring.py; its name has letters, digits and _ only"
        )
    if (size := path.stat().st_size) > MAX_UNPACKED_BYTES:
        raise ConfigError(f"code.path: {path}: {too_large(size, MAX_UNPACKED_BYTES)}")
    try:
        return _packed(path.parent, [path.name], into, "code.path")
    except OSError as error:
        raise ConfigError(f"code.path: {error.filename or path}: {error.strerror}") from None


def _pack_folder(folder: Path, into: BinaryIO) -> str:
    try:
        files = sorted(_files(folder, "code.path", ignore_file=IGNORE_FILE))
        if not files:
            raise ConfigError(f"code.path: {folder} has no files")
        digest = _packed(folder, files, into, "code.path")
    except OSError as error:
        raise ConfigError(f"code.path: {error.filename or folder}: {error.strerror}") from None
    if REQUIREMENTS in files:
        parse((folder / REQUIREMENTS).read_bytes())
    return digest


def _packed(folder: Path, files: Sequence[str], into: BinaryIO, field: str) -> str:
    """Write an archive of these files, the same for the same content; returns its digest."""
    with zipfile.ZipFile(into, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in files:
            info = zipfile.ZipInfo(name, _EPOCH)
            info.external_attr = 0o644 << 16
            is_packed = name.endswith(_ALREADY_PACKED)
            info.compress_type = zipfile.ZIP_STORED if is_packed else zipfile.ZIP_DEFLATED
            with (folder / name).open("rb") as source, archive.open(info, "w") as packed:
                shutil.copyfileobj(source, packed, _BLOCK_BYTES)
    size = into.seek(0, os.SEEK_END)
    if size > MAX_CODE_BYTES:
        raise ConfigError(f"{field}: {folder}: {too_large(size, MAX_CODE_BYTES)}")
    return digest_of_file(into)


def check(archive: BinaryIO, *, most_bytes: int = MAX_UNPACKED_BYTES) -> list[str]:
    """The names of the files of an archive that can be unpacked, to at most `most_bytes`.

    Raises:
        InvalidError: it is none, has paths outside, links, or too much in it, or requirements that
            are wrong.
    """
    try:
        with _opened(archive) as whole:
            names = [info.filename for info in _members(whole, most_bytes)]
            if REQUIREMENTS in names:
                with whole.open(REQUIREMENTS) as source:
                    parse(source.read(MAX_BYTES + 1))
            return names
    except BROKEN as error:
        raise InvalidError(f"code: not a zip archive: {error}") from None


def unpack(
    archive: BinaryIO, digest: str, into: Path, *, most_bytes: int = MAX_UNPACKED_BYTES
) -> Path:
    """The folder `into/digest` with the files, which nobody can write.

    Raises:
        IntegrityError: the archive has another digest.
        InvalidError: as `check`.
    """
    target = into / digest
    if target.is_dir():
        return target
    if digest_of_file(archive) != digest:
        raise IntegrityError(f"code: the archive of {digest} has another digest")
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as name:
        folder = Path(name) / digest
        folder.mkdir()
        _extract(archive, folder, most_bytes)
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():  # else somebody else has unpacked it
                raise
    return target


def _opened(archive: BinaryIO) -> zipfile.ZipFile:
    return opened(archive, "code", most_files=MAX_FILES, most_listed_bytes=_LISTED_BYTES)


def _extract(archive: BinaryIO, folder: Path, left: int) -> None:
    try:
        with _opened(archive) as whole:
            for info in _members(whole, left):
                path = folder / info.filename
                path.parent.mkdir(parents=True, exist_ok=True)
                with whole.open(info) as source, path.open("wb") as target:
                    while data := source.read(_BLOCK_BYTES):  # its header may lie
                        left -= len(data)
                        if left < 0:
                            raise InvalidError("code: has more in it than its header says")
                        target.write(data)
                path.chmod(0o444)
    except OSError as error:
        raise UnavailableError(f"code: cannot be unpacked here: {error.strerror}") from None
    except BROKEN as error:
        raise InvalidError(f"code: not a zip archive: {error}") from None
    for path in (folder, *(each for each in folder.rglob("*") if each.is_dir())):
        path.chmod(0o755)  # so that the user of the sandbox may read it


def _files(folder: Path, field: str, *, ignore_file: str) -> Iterator[str]:
    """Names of the files to pack; `ignore_file` in the folder says which others stay out."""
    ignore = folder / ignore_file
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
                raise ConfigError(f"{field}: {path} is not a file; links are not followed")
            count, total = count + 1, total + found.st_size
            if count > MAX_FILES:
                raise ConfigError(f"{field}: {folder} has more than {MAX_FILES} files")
            if total > MAX_UNPACKED_BYTES:
                text = too_large(total, MAX_UNPACKED_BYTES)
                raise ConfigError(f"{field}: {folder}: at {path}: {text}")
            yield name


def _members(archive: zipfile.ZipFile, most_bytes: int) -> list[zipfile.ZipInfo]:
    return plain_members(archive, "code", most_files=MAX_FILES, most_bytes=most_bytes)
