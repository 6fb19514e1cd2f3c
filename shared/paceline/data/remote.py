"""Data in object stores, by fsspec: `s3://bucket/rows.jsonl`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.data.errors import MissingDataError
from paceline.data.files import ALLOWED, format_of
from paceline.errors import InvalidError
from paceline.platform.object_stores import (
    filesystem_of,
    has_credentials,
    installing_store,
    translated,
)

_PIECE_BYTES = 1 << 20
MAX_FILES = 1000


def check_url(url: str) -> None:
    """Refuse a URL that must be in no job; the message does not quote it.

    Raises:
        InvalidError: it has credentials, or leads to another store.
    """
    if has_credentials(url):
        raise InvalidError(
            "a URL with credentials would be shown to all who may read the job; they belong into "
            "the environment of experience"
        )
    if "::" in url:
        raise InvalidError("a URL with '::' is not allowed; name the object itself")


def identity(url: str) -> str:
    """What changes when an object does, according to its store.

    Raises:
        MissingDataError: there is no such object, or it may not be read.
        InvalidError: its store needs a package that is not installed.
        UnavailableError: the store does not answer.
    """
    return json.dumps([_identity(url, each) for each in _objects(url)], sort_keys=True)


def fetched(url: str, into: Path, *, most_bytes: int) -> str:
    """Copy an object, or those of a folder or pattern, below `into`; returns the local path.

    Raises:
        InvalidError: there are more than `most_bytes`; others as `identity`.
    """
    objects = _objects(url)
    folder = into / "fetched"
    folder.mkdir()
    left = most_bytes
    names = [Path(each["name"]).name for each in objects]
    if len(set(names)) < len(names):
        raise InvalidError(f"{url}: two files have the same name; give a pattern for one folder")
    for name, each in zip(names, objects, strict=True):
        left -= _copy(url, each, folder / name, left)
    return str(folder / names[0]) if len(names) == 1 else str(folder)


def _copy(url: str, found: dict[str, Any], into: Path, most_bytes: int) -> int:
    size = 0
    with (
        translated(url, MissingDataError),
        _filesystem(url)[0].open(found["name"], "rb") as source,
        into.open("wb") as target,
    ):
        while data := source.read(_PIECE_BYTES):
            size += len(data)
            if size > most_bytes:
                raise InvalidError(
                    f"{url}: has more than the {most_bytes} bytes that are left for data of object "
                    "stores (`data_bytes` of experience)"
                )
            target.write(data)
    return size


def _objects(url: str) -> list[dict[str, Any]]:
    """The files that a URL means, sorted by name."""
    if any("**" in part and part != "**" for part in url.split("/")):
        raise InvalidError(f"{url}: '**' may only stand for folders, as in rows/**/*.parquet")
    with translated(url, MissingDataError):
        filesystem, path = _filesystem(url)
        filesystem.invalidate_cache()  # of listings, which fsspec keeps as long as the process
        if any(sign in path for sign in "*?["):
            found = [dict(each) for each in filesystem.glob(path, detail=True).values()]
        else:
            about = dict(filesystem.info(path))
            is_folder = about.get("type") == "directory"
            found = [*map(dict, filesystem.ls(path, detail=True))] if is_folder else [about]
    files = [each for each in found if each.get("type") != "directory"]
    files = [each for each in files if format_of(str(each["name"]))[0]]
    if not files:
        raise MissingDataError(f"{url}: has no files of rows; allowed: {ALLOWED}")
    if len(files) > MAX_FILES:
        raise InvalidError(f"{url}: {len(files)} files of rows; at most {MAX_FILES} are allowed")
    return sorted(files, key=lambda each: str(each["name"]))


def _filesystem(url: str) -> tuple[Any, str]:
    scheme = url.partition("://")[0]
    try:
        return filesystem_of(url)
    except (ImportError, ValueError) as error:
        raise InvalidError(
            f"{url}: {error}; beside experience: {installing_store(scheme)}"
        ) from None


def _identity(url: str, about: dict[str, Any]) -> list[str]:
    keys = ("name", "size", "ETag", "etag", "md5Hash", "LastModified", "last_modified", "mtime")
    return [url, *(f"{key}={about[key]}" for key in keys if key in about)]
