"""Which files a path of data means."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from paceline.data.errors import MissingDataError
from paceline.errors import InvalidError

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
    compressed: str = ""  # the suffix, if it is


def format_of(name: str) -> tuple[str, str]:
    """Format and compression of a file; empty if it is none of rows."""
    suffixes = Path(name).suffixes
    packed = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSED else ""
    found = _FORMATS.get(suffixes[-1], "") if suffixes else ""
    return ("", "") if packed and found != LINES else (found, packed)


def find(path: Path, name: str) -> list[DataFile]:
    """The files that a path means: a file, a folder, or a pattern of names; sorted by name.

    Raises:
        MissingDataError: there are none.
        InvalidError: they are of several formats or splits.
    """
    if path.is_file():
        kind, packed = format_of(path.name)
        if not kind:
            raise InvalidError(f"{name}: a file of an unknown format; allowed: {ALLOWED}")
        return [DataFile(path, name, kind, packed)]
    if path.is_dir():
        return _in_folder(path, name)
    if any(sign in path.name for sign in _GLOB) and path.parent.is_dir():
        named = (each for each in path.parent.iterdir() if fnmatchcase(each.name, path.name))
        found = _listed(named, path.parent)
        return _checked([_file(each, each.name) for each in found if each.is_file()], name)
    raise MissingDataError(f"{name}: no such file or folder{_nearby(path)}")


def _in_folder(folder: Path, name: str) -> list[DataFile]:
    if (folder / "dataset_dict.json").is_file():
        splits = [str(each)[:60] for each in _strings(folder / "dataset_dict.json", "splits")]
        example = f"{name}/{splits[0]}" if splits else name
        raise InvalidError(
            f"{name}: has the splits {', '.join(splits)}; name the folder of one ({example})"
        )
    if (folder / "state.json").is_file():  # what `save_to_disk` writes, in the order of its rows
        files = [each["filename"] for each in _objects(folder / "state.json", "_data_files")]
        inside = [each for each in files if isinstance(each, str) and Path(each).name == each]
        if len(inside) != len(files) or not all((folder / each).is_file() for each in inside):
            raise MissingDataError(f"{name}: state.json names files that are not there")
        return _checked([_file(folder / each, f"{name}/{each}") for each in inside], name)
    found = (each for each in folder.rglob("*") if each.is_file())
    files = [_file(each, each.relative_to(folder).as_posix()) for each in _listed(found, folder)]
    return _checked([each for each in files if each.format], name)


def _listed(found: Iterator[Path], root: Path) -> list[Path]:
    """Files that may have rows, sorted; without hidden ones below `root`."""
    files: list[Path] = []
    for each in found:
        if each.name in _ABOUT or _is_hidden(each.relative_to(root)):
            continue
        files.append(each)
        if len(files) > MAX_FILES:
            raise InvalidError(f"{each.parent}: more than {MAX_FILES} files")
    return sorted(files)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _file(path: Path, name: str) -> DataFile:
    return DataFile(path, name, *format_of(path.name))


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


def _read(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return json.loads(file.read(1 << 20))
    except (ValueError, RecursionError) as error:
        raise InvalidError(f"{path.name}: cannot be read: {error}") from None


def _strings(path: Path, field: str) -> list[Any]:
    raw = _read(path)
    found = cast("dict[str, Any]", raw).get(field) if isinstance(raw, dict) else None
    return cast("list[Any]", found) if isinstance(found, list) else []


def _objects(path: Path, field: str) -> list[dict[str, Any]]:
    return [each for each in _strings(path, field) if isinstance(each, dict) and "filename" in each]
