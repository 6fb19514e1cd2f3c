"""Packages that the code of jobs requires: the section `packages` of the settings."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from paceline.config.quota import GIB, MIB
from paceline.plugins import StrictModel


class PackageSettings(StrictModel):
    """Installation of packages for the code of jobs. See docs/own-code.md.

    The same in experience, environment and reward; a job chooses none of it.
    """

    install: bool = True
    """If false, code with a `requirements.txt` is refused."""
    index_url: str = Field(default="", repr=False)
    """Index of the packages; `index-url` of pip's configuration if empty, or PyPI."""
    no_index: bool = False
    """Install only from the folder `wheels` of the code, whatever pip's configuration says."""
    folder: Path | None = None
    """Where installed packages are kept; if null, a folder of this user in the temporary one."""
    timeout_s: float = Field(default=300.0, gt=0, le=3600)
    """Timeout of one installation."""
    most_bytes: int = Field(default=2 * GIB, ge=MIB)
    """Bytes that the packages of one `requirements.txt` may take, unpacked."""
    cache_bytes: int = Field(default=8 * GIB, ge=MIB)
    """Bytes that all sets of packages may take; the least recently used go first."""
    tenant_bytes: int = Field(default=4 * GIB, ge=MIB)
    """Bytes that one tenant's sets may take; a set that several use counts for each of them."""
