"""Reads wheels without running or unpacking them, and refuses those that are not what they say."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from email.errors import MessageError
from pathlib import Path, PurePosixPath
from typing import IO

from packaging.markers import UndefinedEnvironmentName
from packaging.metadata import RawMetadata, parse_email
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag
from packaging.utils import (
    BuildTag,
    InvalidWheelFilename,
    NormalizedName,
    canonicalize_name,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from paceline.errors import InvalidError
from paceline.isolation.code.members import BROKEN, SMALLEST_BYTES, opened, plain_members

MOST_METADATA_BYTES = 4 << 20
MOST_FILES = 50_000
MOST_LIST_BYTES = 16 << 20  # of what lists files: in the archive, and in RECORD
MOST_TAGS = 1000  # of a name; those that there are have a few dozen
_SHOWN = 200
_INFO = ".dist-info"
_SINGLE = ("METADATA", "WHEEL", "RECORD")
# Of `packaging`; a ValueError is also a number of 5000 digits.
_UNREADABLE = (ValueError, MessageError, UndefinedEnvironmentName)
_READ_WHOLE = ("WHEEL", "RECORD", "entry_points.txt")


class WheelError(InvalidError):
    """A wheel that is not installed, as it is broken, names addresses or is not what it says."""


class MetadataError(WheelError):
    """What a wheel needs cannot be read."""


@dataclass(frozen=True, slots=True)
class WheelName:
    """The name of a wheel's file, and its parts."""

    file: str
    project: NormalizedName
    version: Version
    build: BuildTag
    tags: frozenset[Tag]

    @classmethod
    def parse(cls, file: str) -> WheelName:
        """Parse `NAME-VERSION(-BUILD)-PYTHON-ABI-PLATFORM.whl`.

        Raises:
            WheelError: it is something else, or stands for more than `MOST_TAGS` of tags.
        """
        parts = file.removesuffix(".whl").split("-")[-3:]
        if math.prod(part.count(".") + 1 for part in parts) > MOST_TAGS:
            raise WheelError(f"{file[:200]!r} has more than {MOST_TAGS} tags")
        if "/" in file or "\0" in file:
            raise WheelError(f"{file[:200]!r} is no name of a file")
        try:
            return cls(file, *parse_wheel_filename(file))
        except (InvalidWheelFilename, InvalidVersion) as error:
            raise WheelError(f"{file[:200]!r} is no name of a wheel: {error}") from None


@dataclass(frozen=True, slots=True)
class WheelMetadata:
    """What `METADATA` says of the packages that a wheel needs."""

    requires: tuple[Requirement, ...]
    requires_python: SpecifierSet

    @classmethod
    def parse(cls, content: bytes, name: WheelName) -> WheelMetadata:
        """Parse the `METADATA` of the wheel with this name.

        Raises:
            MetadataError: it cannot be parsed.
            WheelError: it is another package's, or has an address in what it needs.
        """
        if len(content) > MOST_METADATA_BYTES:
            raise MetadataError(f"{name.file}: METADATA has {len(content)} bytes")
        try:
            fields, unparsed = parse_email(content)
            wrong = {"name", "version", "requires-dist", "requires-python"} & set(unparsed)
            if wrong:
                raise MetadataError(f"{name.file}: METADATA: {min(wrong)} cannot be parsed")
            _check_identity(fields, name)
            requires = tuple(_requirement(text, name) for text in fields.get("requires_dist", ()))
            return cls(requires, SpecifierSet(fields.get("requires_python", "")))
        except _UNREADABLE as error:
            reason = str(error).partition("\n")[0][:_SHOWN]
            raise MetadataError(f"{name.file}: METADATA: {reason}") from None


def read_wheel(
    path: Path | IO[bytes], name: WheelName, *, most_bytes: int
) -> tuple[WheelMetadata, int]:
    """What a wheel needs, and how many bytes it takes unpacked.

    Raises:
        WheelError: it is not a zip archive of plain files with one `.dist-info`, or unpacks to more
            than `most_bytes`, or is refused by `WheelMetadata.parse`.
    """
    try:
        with _opened(path, name) as archive:
            members = plain_members(
                archive, name.file, most_files=MOST_FILES, most_bytes=most_bytes
            )
            folder = _info_folder([each.filename for each in members], name)
            _check_lists(members, folder, name)
            with archive.open(f"{folder}/METADATA") as file:
                content = file.read(MOST_METADATA_BYTES + 1)
    except BROKEN as error:
        raise WheelError(f"{name.file}: not a zip archive: {error}") from None
    except WheelError:
        raise
    except InvalidError as error:
        raise WheelError(error.message) from None
    return WheelMetadata.parse(content, name), _bytes_on_disk(members)


@contextmanager
def _opened(path: Path | IO[bytes], name: WheelName) -> Generator[zipfile.ZipFile]:
    with ExitStack() as stack:
        file = stack.enter_context(path.open("rb")) if isinstance(path, Path) else path
        limits = {"most_files": MOST_FILES, "most_listed_bytes": MOST_LIST_BYTES}
        yield stack.enter_context(opened(file, name.file, **limits))


def _bytes_on_disk(members: Sequence[zipfile.ZipInfo]) -> int:
    """A disk has room for so many files too, so empty ones count."""
    folders = {each for info in members for each in PurePosixPath(info.filename).parents}
    files = sum(max(each.file_size, SMALLEST_BYTES) for each in members)
    return files + SMALLEST_BYTES * len(folders)


def _check_lists(members: Sequence[zipfile.ZipInfo], folder: str, name: WheelName) -> None:
    """Files that are read whole to unpack a wheel."""
    lists = {f"{folder}/{each}" for each in _READ_WHOLE}
    for each in members:
        if each.filename in lists and each.file_size > MOST_LIST_BYTES:
            raise WheelError(
                f"{name.file}: {each.filename[:_SHOWN]} has {each.file_size} bytes; at most "
                f"{MOST_LIST_BYTES} are allowed"
            )


def _info_folder(files: list[str], name: WheelName) -> str:
    """The only `.dist-info` of a wheel, which has its name and version."""
    folders = sorted({file.partition("/")[0] for file in files if "/" in file})
    infos = [each for each in folders if each.lower().endswith(_INFO)]
    if len(infos) != 1:
        listed = ", ".join(infos) or "none"
        raise WheelError(f"{name.file}: one folder {_INFO} is needed; it has {listed}"[:500])
    project, _, version = infos[0][: -len(_INFO)].partition("-")
    if not _is_named(project, version, name):
        raise WheelError(f"{name.file}: it has the folder {infos[0][:200]} of another package")
    if missing := [each for each in _SINGLE if f"{infos[0]}/{each}" not in files]:
        raise WheelError(f"{name.file}: {infos[0]} has no file {missing[0]}")
    return infos[0]


def _check_identity(fields: RawMetadata, name: WheelName) -> None:
    project, version = fields.get("name", ""), fields.get("version", "")
    if not _is_named(project, version, name):
        raise WheelError(
            f"{name.file}: METADATA is of {project[:100]!r} {version[:100]!r}, not of "
            f"{name.project} {name.version}"
        )


def _is_named(project: str, version: str, name: WheelName) -> bool:
    try:
        return canonicalize_name(project) == name.project and Version(version) == name.version
    except ValueError:  # it is none, or has too many digits
        return False


def _requirement(text: str, name: WheelName) -> Requirement:
    parsed = Requirement(text)
    if parsed.url is not None:
        raise WheelError(
            f"{name.file}: it requires {parsed.name} from an address; packages come from the "
            "index and from the wheels of the code only"
        )
    # Else only the resolver would find that versions or a marker make no sense.
    parsed.specifier.contains("0")
    if parsed.marker is not None:
        parsed.marker.evaluate({"extra": ""})
    return parsed
