"""Packages of jobs are those that the real pip would install from the same index."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename

from paceline.config.packages import PackageSettings
from paceline.isolation.code.install import InstallError
from paceline.isolation.code.packages import Packages
from paceline_harness.packages.package_index import PackageIndex, serving
from paceline_harness.packages.wheels import write_wheel

Versions = dict[str, str]
EXTRA = ("Provides-Extra: more",)


def publish(index: PackageIndex) -> None:
    """Some packages that need one another."""
    folder = index.folder
    write_wheel(folder, "app", "1.0", requires=("lib<2", 'tool; extra == "more"'), fields=EXTRA)
    write_wheel(folder, "app", "2.0", requires=("lib>=2", 'tool; extra == "more"'), fields=EXTRA)
    write_wheel(folder, "app", "3.0", fields=("Requires-Python: <3",))
    for version in ("1.0", "1.5", "2.0", "3.0rc1"):
        write_wheel(folder, "lib", version, requires=('nowhere; python_version < "3"',))
    write_wheel(folder, "tool", "1.0", requires=("lib<2", 'base ; sys_platform == "linux"'))
    write_wheel(folder, "base", "1.0")
    write_wheel(folder, "base", "1.0.post1")
    write_wheel(folder, "base", "2.0")
    write_wheel(folder, "early", "1.0.dev1")
    write_wheel(folder, "broken", "1.0", requires=("missing>=1",))
    write_wheel(folder, "broken", "0.9")
    index.yanked = {"base-2.0-py3-none-any.whl"}


def pip_takes(index: PackageIndex, file: Path) -> Versions | None:
    """What pip would install; None: it refuses."""
    options = (
        "--dry-run",
        "--quiet",
        "--ignore-installed",
        "--only-binary",
        ":all:",
        "--no-cache-dir",
    )
    report = file.with_name("report.json")
    command = (sys.executable, "-m", "pip", "install", *options, "--index-url", index.url)
    done = subprocess.run(
        [*command, "--report", report, "-r", file],
        capture_output=True,
        env={"PATH": os.defpath, "PIP_CONFIG_FILE": os.devnull},
    )
    if done.returncode:
        return None
    metadata = (each["metadata"] for each in json.loads(report.read_text())["install"])
    return {each["name"]: each["version"] for each in metadata}


async def we_take(index: PackageIndex, code: Path) -> Versions | None:
    """What is installed for code; None: it is refused."""
    settings = {"index_url": index.url, "folder": code / "cache"}
    packages = Packages(PackageSettings.model_validate(settings))
    wanted = packages.wanted(code)
    assert wanted is not None
    try:
        folder = await packages.folder(wanted)
    except InstallError:
        return None
    finally:
        await packages.close()
    names = (each.name.removesuffix(".dist-info") for each in folder.glob("*.dist-info"))
    wheels = (parse_wheel_filename(f"{name}-py3-none-any.whl") for name in names)
    return {name: str(version) for name, version, *_ in wheels}


@pytest.mark.parametrize(
    "requirements",
    [
        ("app",),
        ("app[more]",),
        ("lib>=2.5a1", "base==2.0"),
        ("base", "early"),
        ("broken",),
        ("app", "tool", "lib==2.0"),
    ],
    ids=" ".join,
)
async def test_the_same_versions_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requirements: tuple[str, ...]
) -> None:
    for name in [each for each in os.environ if each.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    file = tmp_path / "requirements.txt"
    file.write_text("\n".join(requirements))
    with serving(PackageIndex(tmp_path / "index")) as index:
        publish(index)
        assert await we_take(index, tmp_path) == pip_takes(index, file)
