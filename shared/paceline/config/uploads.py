"""The sections `code` and `data` of a job file: what comes with the job."""

from __future__ import annotations

from pydantic import Field

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
