"""Models in object stores, by fsspec URL, and their cache: folders named by what is in them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, UnavailableError
from paceline.models.arrived import Arrived, unheard
from paceline.models.weights import is_wanted
from paceline.platform.files import locked, sync
from paceline.platform.object_stores import (
    filesystem_of,
    has_credentials,
    installing_store,
    package_of,
    shown,
    translated,
)

_BLOCK_BYTES = 8 << 20
# What stores call the version of an object's content; without one, the time of its last change.
_VERSIONS = ("ETag", "etag", "md5Hash", "content_md5", "generation", "LastModified", "mtime")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A folder in an object store: sizes in bytes and versions of its files, by name."""

    url: str
    sizes: Mapping[str, int]
    versions: Mapping[str, str]

    @property
    def digest(self) -> str:
        """SHA-256 in hex of names, sizes and versions: another one means other files."""
        listed = [[name, self.sizes[name], self.versions[name]] for name in sorted(self.sizes)]
        return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


class ModelStores:
    """Reads model folders from the stores that an installation allows."""

    def __init__(self, schemes: Sequence[str], cache: Path) -> None:
        self._schemes = schemes
        self._cache = cache

    def find(self, url: str) -> StoredModel:
        """List a folder.

        Raises:
            ConfigError: the scheme is not allowed or not installed, or there is no such folder.
            UnavailableError: the store does not answer.
        """
        fs, root = self._open(url)
        with _translated(url):
            fs.invalidate_cache()
            listed: list[dict[str, Any]] = fs.ls(root, detail=True)
        files = {info["name"].rsplit("/", 1)[-1]: info for info in listed if info["type"] == "file"}
        files = {name: info for name, info in files.items() if name}
        if not files:
            raise ConfigError(f"model.path: {shown(url)} is no folder, or is empty")
        sizes = {name: int(info["size"] or 0) for name, info in files.items()}
        return StoredModel(url, sizes, {name: _version(info) for name, info in files.items()})

    def read(self, model: StoredModel, names: Sequence[str]) -> dict[str, bytes]:
        """The content of small files; raises as `find`."""
        fs, root = self._open(model.url)
        with _translated(model.url):
            return {name: fs.cat_file(f"{root}/{name}") for name in names}

    def download(self, url: str, digest: str, *, arrived: Arrived = unheard) -> Path:
        """Folder with the files, in the cache; they must be those of this digest.

        A folder that is in the cache is complete: it appears there by a rename. Processes that want
        the same one wait for each other; those of other machines have a cache of their own, or
        share one on a volume whose file locks work.

        Raises:
            ConfigError: as `find`, or the files are others by now.
            UnavailableError: the store does not answer, or a file arrived incompletely.
        """
        place = self._cache / digest
        with locked(self._cache / f"{digest}.lock"):
            if place.is_dir():
                return place
            model = self.find(url)
            if model.digest != digest:
                raise ConfigError(
                    f"model.path: {shown(url)} has changed since the job was submitted; its "
                    "files are others"
                )
            draft = self._cache / f".{digest}.draft"
            shutil.rmtree(draft, ignore_errors=True)  # of a process that died
            draft.mkdir(parents=True)
            try:
                self._fill(model, draft, arrived)
                if self.find(url).digest != digest:
                    raise ConfigError(
                        f"model.path: {shown(url)} has changed while it was downloaded"
                    )
                draft.rename(place)
                sync(place.parent)
            finally:
                with suppress(OSError):
                    shutil.rmtree(draft, ignore_errors=True)
        return place

    def _fill(self, model: StoredModel, draft: Path, arrived: Arrived) -> None:
        fs, root = self._open(model.url)
        names = sorted(filter(is_wanted, model.sizes))
        total, before = float(sum(model.sizes[name] for name in names)), 0
        for name in names:
            with _translated(model.url), fs.open(f"{root}/{name}", "rb") as source:
                copied = partial(_copied, arrived, before, total)
                num_bytes = _copy(source, draft / name, copied)
            before += num_bytes
            if num_bytes != model.sizes[name]:
                raise UnavailableError(
                    f"model.path: {shown(model.url)}/{name} arrived with {num_bytes} of "
                    f"{model.sizes[name]} bytes"
                )
        sync(draft)

    def _open(self, url: str) -> tuple[Any, str]:
        scheme = url.partition("://")[0]
        if has_credentials(url):
            raise ConfigError(
                "model.path: a URL with credentials would be shown to all who may read the job; "
                "they belong into the environment of gateway and trainer"
            )
        if "::" in url or scheme not in self._schemes:
            allowed = ", ".join(f"{each}://" for each in self._schemes) or "none"
            raise ConfigError(
                f"model.path: {shown(url)}: this installation takes models from: {allowed} "
                "(`models.stores` of its settings)"
            )
        with _translated(url):
            try:
                fs, root = filesystem_of(url)
            except ImportError:
                raise ConfigError(
                    f"model.path: {scheme}:// needs {package_of(scheme)}, which is not installed "
                    f"in gateway or trainer; {installing_store(scheme)}"
                ) from None
            except ValueError as error:
                raise ConfigError(f"model.path: {shown(url)}: {error}") from None
        return fs, root.rstrip("/")


def _copied(arrived: Arrived, before: int, total: float, num_bytes: int) -> None:
    arrived(float(before + num_bytes), total)


def _copy(source: Any, path: Path, copied: Callable[[int], object]) -> int:
    num_bytes = 0
    with path.open("wb") as target:
        while block := source.read(_BLOCK_BYTES):
            target.write(block)
            num_bytes += len(block)
            copied(num_bytes)
    sync(path)
    return num_bytes


def _version(info: Mapping[str, Any]) -> str:
    for name in _VERSIONS:
        if info.get(name) not in (None, ""):
            return f"{name}:{info[name]}"
    return f"created:{info.get('created', '')}"


def _translated(url: str) -> AbstractContextManager[None]:
    return translated(f"model.path: {shown(url)}", ConfigError)
