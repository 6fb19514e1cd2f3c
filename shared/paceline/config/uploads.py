"""The sections `code` and `data` of a job file, and folders from which jobs may read data."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from paceline.plugins import StrictModel


class CodeSpec(StrictModel):
    """Code that comes with the job; `module:attribute` names then mean modules in its folder."""

    path: str = Field(default="", max_length=1024)
    """A Python file or a folder next to the job file, which `paceline submit`, `paceline run` and
    the SDK pack and upload. Files that the folder's `.gitignore` names stay out."""
    digest: str = Field(default="", max_length=64, pattern="^([0-9a-f]{64})?$")
    """SHA-256 of the uploaded archive; filled in by whoever uploads it."""


class DataSpec(StrictModel):
    """Data that come with the job, for environments that read rows (docs/data.md)."""

    path: str = Field(default="", max_length=1024)
    """A file or folder next to the job file, which `paceline submit`, `paceline run` and the SDK
    pack and upload."""
    digest: str = Field(default="", max_length=64, pattern="^([0-9a-f]{64})?$")
    """SHA-256 of the uploaded archive; filled in by whoever uploads it."""


# Protocols of fsspec that read files of this machine, where links lead anywhere.
_NO_STORE = re.compile(
    "file|local|asynclocal|async_?wrapper|(block|file|simple)?cached?|dask|data|dir|dvc|generic|git|"
    "libarchive|memory|reference|tar|zip"
)


def _check_data_folder(value: str) -> str:
    scheme, mark, _ = value.partition("://")
    if (mark and not _NO_STORE.fullmatch(scheme)) or (not mark and value.startswith("/")):
        return value
    raise ValueError(f"{value!r} is neither an absolute path nor a URL of an object store")


DataFolder = Annotated[str, AfterValidator(_check_data_folder)]
