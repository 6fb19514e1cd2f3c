"""Code of jobs on the disk of a worker: fetched once, and bounded in all."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

import pytest

from paceline.config.packages import PackageSettings
from paceline.errors import UnavailableError
from paceline.isolation.code.archive import pack
from paceline.isolation.code.folders import KEPT_S, CodeFolders
from paceline.isolation.code.packages import Packages
from paceline.platform.digest import digest_of


class Site:
    """Archives by digest, and the time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fetched: list[str] = []
        self.archives: dict[str, bytes] = {}

    def add(self, folder: Path, num_bytes: int) -> str:
        folder.mkdir()
        (folder / "data").write_bytes(bytes(num_bytes))
        (folder / "name").write_text(folder.name)
        into = io.BytesIO()
        pack(folder, into)
        digest = digest_of(into.getvalue())
        self.archives[digest] = into.getvalue()
        return digest

    async def fetch(self, digest: str, into: BinaryIO) -> None:
        self.fetched.append(digest)
        into.write(self.archives[digest])


@pytest.fixture
async def kept(tmp_path: Path) -> AsyncIterator[tuple[Site, CodeFolders]]:
    site = Site()
    packages = Packages(PackageSettings(folder=tmp_path / "packages"))
    made = CodeFolders(site.fetch, packages=packages, most_bytes=2000, clock=lambda: site.now)
    yield site, made
    await made.close()


async def test_what_is_in_use_stays_and_what_is_not_makes_room(
    kept: tuple[Site, CodeFolders], tmp_path: Path
) -> None:
    site, made = kept
    first, second, third = (site.add(tmp_path / f"job{n}", 1000) for n in range(3))
    path = (await made.folder(first)).path
    await made.folder(second)
    with pytest.raises(UnavailableError, match="code of other jobs is in use"):
        await made.folder(third)
    assert path.exists()
    site.now += KEPT_S + 1.0
    await made.folder(second)
    assert (await made.folder(third)).path.exists()
    assert not path.exists()
    assert site.fetched == [first, second, third]
