"""Which files a path of data means."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO, cast

from paceline.data.errors import MissingDataError
from paceline.errors import InvalidError
from paceline.platform.beneath import ReadableFolders

MAX_FILES = 10_000
LINES, PARQUET, ARROW = "lines", "parquet", "arrow"
_FORMATS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), LINES),
    ".parquet": PARQUET,
    ".arrow": ARROW,
}
COMPRESSED = (".gz", ".zst")
ALLOWED = ".jsonl, .ndjson, .json (one object a line; also .gz, .zst), .parquet, .arrow"
_SPLITS = ("train", "test", "validation", "valid", "dev", "eval")
_GLOB = ("*", "?", "[")
# What folders of `datasets` and of the Hub have besides their rows.
_ABOUT = frozenset({"dataset_info.json", "dataset_dict.json", "dataset_infos.json", "state.json"})


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of rows, and how it is called in messages."""

    path: Path
    name: str
    format: str
    compressed: str  # the suffix, if it is
    folders: ReadableFolders

    def open(self) -> BinaryIO:
        """Open it to be read; raises as `ReadableFolders.open`."""
        return self.folders.open(self.path, self.name)


def format_of(name: str) -> tuple[str, str]:
    """Format and compression of a file; empty if it is none of rows."""
    suffixes = Path(name).suffixes
    packed = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSED else ""
    found = _FORMATS.get(suffixes[-1], "") if suffixes else ""
    return ("", "") if packed and found != LINES else (found, packed)


def find(path: Path, name: str, folders: ReadableFolders) -> list[DataFile]:
    """The files that a path means: a file, a folder, or a pattern of names; sorted by name.

    Raises:
        MissingDataError: there are none.
        InvalidError: they are of several formats or splits, or `path` is not below `folders`.
    """
    path = Path(folders.real(path, name))
    if path.is_file():
        kind, packed = format_of(path.name)
        if not kind:
            raise InvalidError(f"{name}: a file of an unknown format; allowed: {ALLOWED}")
        return [DataFile(path, name, kind, packed, folders)]
    if path.is_dir():
        return _in_folder(path, name, folders)
    if any(sign in path.name for sign in _GLOB) and path.parent.is_dir():
        folders.real(path.parent, name)
        inside = (each.name for each in path.parent.iterdir() if each.is_file())
        named = (each for each in inside if fnmatchcase(each, path.name))
        listed = _listed(named, path.parent)
        return _checked([_file(path.parent / each, each, folders) for each in listed], name)
    raise MissingDataError(f"{name}: no such file or folder{_nearby(path)}")


def _in_folder(folder: Path, name: str, folders: ReadableFolders) -> list[DataFile]:
    def read(file: str, field: str) -> list[Any]:
        with folders.open(folder / file, f"{name}/{file}") as opened:
            return _strings(opened, file, field)

    if (folder / "dataset_dict.json").is_file():
        splits = [str(each)[:60] for each in read("dataset_dict.json", "splits")]
        example = f"{name}/{splits[0]}" if splits else name
        raise InvalidError(
            f"{name}: has the splits {', '.join(splits)}; name the folder of one ({example})"
        )
    if (folder / "state.json").is_file():  # what `save_to_disk` writes, in the order of its rows
        files = [each["filename"] for each in _named(read("state.json", "_data_files"))]
        inside = [each for each in files if isinstance(each, str) and Path(each).name == each]
        if len(inside) != len(files) or not all((folder / each).is_file() for each in inside):
            raise MissingDataError(f"{name}: state.json names files that are not there")
        return _checked([_file(folder / each, f"{name}/{each}", folders) for each in inside], name)
    listed = _listed(folders.names(folder, name), folder)
    files = [_file(folder / each, each, folders) for each in listed]
    return _checked([each for each in files if each.format], name)


def _listed(found: Iterable[str], root: Path) -> list[str]:
    """Relative paths of files that may have rows, sorted; without hidden ones."""
    files: list[Path] = []
    for each in map(Path, found):
        if each.name in _ABOUT or _is_hidden(each):
            continue
        files.append(each)
        if len(files) > MAX_FILES:
            raise InvalidError(f"{root}: more than {MAX_FILES} files")
    return [each.as_posix() for each in sorted(files)]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _file(path: Path, name: str, folders: ReadableFolders) -> DataFile:
    return DataFile(path, name, *format_of(path.name), folders)


def _checked(files: list[DataFile], name: str) -> list[DataFile]:
    """Files that belong together."""
    if not files:
        raise MissingDataError(f"{name}: has no files of rows; allowed: {ALLOWED}")
    for each in files:
        if not each.format:
            raise InvalidError(f"{each.name}: a file of an unknown format; allowed: {ALLOWED}")
    if len(kinds := sorted({each.format for each in files})) > 1:
        raise InvalidError(
            f"{name}: has files of the formats {', '.join(kinds)}; name one, or a pattern "
            f"({name}/*.parquet)"
        )
    splits = {split for each in files for split in _SPLITS if _starts(each, split)}
    if len(splits) > 1:
        raise InvalidError(
            f"{name}: has files of the splits {', '.join(sorted(splits))}; name those of one with "
            f"a pattern ({name}/{min(splits)}*)"
        )
    return files


def _starts(file: DataFile, split: str) -> bool:
    """Whether a file is named after a split: `train.jsonl`, `train-00000-of-00002.parquet`."""
    stem = file.path.name.partition(".")[0].lower()
    return stem == split or stem.startswith((f"{split}-", f"{split}_"))


def _nearby(path: Path) -> str:
    """Files in the same folder, for a message."""
    if not path.parent.is_dir():
        return ""
    names = sorted(each.name for each in path.parent.iterdir() if not each.name.startswith("."))
    return f"; there are {', '.join(names[:20])}" if names else ""


def _strings(opened: BinaryIO, name: str, field: str) -> list[Any]:
    try:
        raw: Any = json.loads(opened.read(1 << 20))
    except (ValueError, RecursionError) as error:
        raise InvalidError(f"{name}: cannot be read: {error}") from None
    found = cast("dict[str, Any]", raw).get(field) if isinstance(raw, dict) else None
    return cast("list[Any]", found) if isinstance(found, list) else []


def _named(files: list[Any]) -> list[dict[str, Any]]:
    return [each for each in files if isinstance(each, dict) and "filename" in each]
