"""The locks of the images hold all that the package needs, by hash, and no address."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((ROOT / "docker" / "locks").glob("*.txt"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
FROM_BASE = {"torch"}
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")
IMAGE = {"sys_platform": "linux", "platform_system": "Linux"}


def entries(lock: Path) -> list[tuple[Requirement, list[str]]]:
    """Each pinned requirement with its hashes."""
    joined = lock.read_text().replace("\\\n", " ").splitlines()
    return [(Requirement(HASH.sub("", line).strip()), HASH.findall(line)) for line in joined]


def pins(lock: Path) -> dict[str, str]:
    """Versions by name, on Linux."""
    on_linux = [
        entry for entry, _ in entries(lock) if entry.marker is None or entry.marker.evaluate(IMAGE)
    ]
    return {canonicalize_name(each.name): str(each.specifier)[2:] for each in on_linux}


def needed(extra: str) -> Iterator[Requirement]:
    """Direct requirements of the package with an extra, on Linux."""
    for text in [*PROJECT["dependencies"], *EXTRAS[extra]]:
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            for other in requirement.extras:
                yield from needed(other)
        elif requirement.marker is None or requirement.marker.evaluate(IMAGE):
            yield requirement


def test_every_image_has_a_lock() -> None:
    light = {"controller", "environment", "experience", "gateway", "reward", "tracking"}
    assert {lock.stem for lock in LOCKS} == light | {"local", "rollout", "trainer", "build"}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_entries_are_exact_hashed_and_without_address(lock: Path) -> None:
    assert entries(lock)
    for requirement, hashes in entries(lock):
        assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), requirement
        assert hashes, requirement
        assert requirement.url is None, requirement
    assert "://" not in lock.read_text()


@pytest.mark.parametrize("lock", [each for each in LOCKS if each.stem != "build"])
def test_a_lock_satisfies_what_its_extra_requires(lock: Path) -> None:
    locked = pins(lock)
    for requirement in needed(lock.stem):
        if requirement.name in FROM_BASE:
            continue
        version = locked.get(canonicalize_name(requirement.name))
        assert version, f"{lock.name} lacks {requirement}; run: python dev/locks.py"
        assert Version(version) in requirement.specifier, f"{lock.name}: {requirement}"


def test_the_build_backend_is_locked() -> None:
    locked = pins(ROOT / "docker" / "locks" / "build.txt")
    for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]:
        requirement = Requirement(text)
        assert Version(locked[canonicalize_name(requirement.name)]) in requirement.specifier


@pytest.mark.parametrize("name", ["service", "trainer", "rollout"])
def test_images_install_by_hash(name: str) -> None:
    """Whatever pip may fetch has a hash, but for plug-ins that somebody adds."""
    text = (ROOT / "docker" / f"{name}.Dockerfile").read_text()
    flat = re.sub(r"\s*\\\n\s*", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    commands = re.findall(r"\bpip\S*(?: --python \S+)? (?:install|wheel|download) [^&\n]*", flat)
    assert len(commands) >= 4
    for command in commands:
        is_hashed = "--require-hashes" in command and "--no-deps" in command
        is_offline = "--no-index" in command or "--no-deps /wheels/paceline-" in command
        assert is_hashed or is_offline, command
        assert " wheel " not in command or "--no-build-isolation" in command, command
        assert "PLUGINS" not in command or "${PLUGINS:---no-index}" in command, command
