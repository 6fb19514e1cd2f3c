"""A place where attacks by packages are tried: an index, one that nobody should ask, and a file.

An attack is seen by a file that code of a source package writes, and by what servers are asked.
"""

from __future__ import annotations

import io
import os
import tarfile
import warnings
import zipfile
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.config.packages import PackageSettings
from paceline.errors import PacelineError
from paceline.isolation.code.packages import Packages
from paceline_harness.packages.package_index import PackageIndex, serving

METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
BACKEND = """
import pathlib
pathlib.Path({canary!r}).write_text("ran")

def get_requires_for_build_wheel(config_settings=None):
    return []
"""
PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


@dataclass
class Range:
    """Where attacks are tried."""

    root: Path
    index: PackageIndex
    evil: PackageIndex  # nobody has a reason to ask it anything
    canary: Path
    made: list[Packages]

    def code(self, *requirements: str, name: str = "code") -> Path:
        """A folder of code with these requirements."""
        folder = self.root / name
        folder.mkdir(exist_ok=True)
        (folder / "requirements.txt").write_text("\n".join(requirements))
        return folder

    async def install(self, code: Path, **settings: object) -> Path:
        """Install what code requires; from the index, unless it is said otherwise."""
        values = {"index_url": self.index.url, "folder": self.root / "cache", "timeout_s": 60.0}
        packages = Packages(PackageSettings.model_validate(values | settings))
        self.made.append(packages)
        wanted = packages.wanted(code)
        assert wanted is not None
        return await packages.folder(wanted)

    async def refuses(self, code: Path, **settings: object) -> str:
        """That it is not installed, and that nothing was run or asked; returns the error."""
        with pytest.raises(PacelineError) as refused:
            await self.install(code, **settings)
        assert not self.canary.exists()
        assert self.evil.asked == []
        return refused.value.message


def without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave this machine's own indexes out of a test."""
    for name in [each for each in os.environ if each.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


@asynccontextmanager
async def attack_range(folder: Path) -> AsyncGenerator[Range]:
    """Both servers, with a source package at the evil one."""
    with (
        serving(PackageIndex(folder / "index")) as index,
        serving(PackageIndex(folder / "evil")) as evil,
    ):
        made = Range(folder, index, evil, folder / "canary", [])
        write_sdist(evil.folder, made.canary)
        try:
            yield made
        finally:
            for each in made.made:
                await each.close()


def write_sdist(folder: Path, canary: Path, name: str = "evil") -> Path:
    """A source package that writes a file when it is built; it needs nothing for that."""
    path = folder / f"{name}-1.0.tar.gz"
    files = {
        "pyproject.toml": PYPROJECT,
        "backend.py": BACKEND.format(canary=str(canary)),
        "PKG-INFO": METADATA.format(name=name, version="1.0"),
    }
    with tarfile.open(path, "w:gz") as archive:
        for file, text in files.items():
            info = tarfile.TarInfo(f"{name}-1.0/{file}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return path


def rewritten(path: Path, change: Callable[[dict[str, bytes]], list[tuple[str, bytes]]]) -> None:
    """Write a wheel again with other members; some may be there twice."""
    with zipfile.ZipFile(path) as wheel:
        members = {name: wheel.read(name) for name in wheel.namelist()}
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w") as wheel:
        warnings.simplefilter("ignore")
        for name, content in change(members):
            wheel.writestr(name, content)
