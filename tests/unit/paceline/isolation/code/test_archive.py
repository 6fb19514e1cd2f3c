"""Packing a folder, and refusing archives that nobody should unpack."""

from __future__ import annotations

import io
import os
import stat
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import parse_job
from paceline.config.quota import MIB
from paceline.errors import ConfigError, IntegrityError, InvalidError, PacelineError
from paceline.isolation.code import archive as codes
from paceline.isolation.code.archive import MAX_FILES
from paceline.isolation.code.modules import missing_modules, own_targets
from paceline.platform.digest import digest_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "task"
    (made / "deep" / "__pycache__").mkdir(parents=True)
    (made / "scoring.py").write_text("def score(item): return 1.0\n")
    (made / "deep" / "words.txt").write_text("a\nb\n")
    (made / "deep" / "__pycache__" / "x.pyc").write_bytes(b"x")
    (made / ".git").mkdir()
    (made / ".git" / "config").write_text("secret")
    (made / "secret.env").write_text("KEY=1")
    (made / ".gitignore").write_text("*.env\n")
    return made


def zipped(*members: tuple[str | zipfile.ZipInfo, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return made.getvalue()


def pack(folder: Path) -> bytes:
    made = io.BytesIO()
    digest = codes.pack(folder, made)
    assert digest == digest_of(made.getvalue())
    return made.getvalue()


def check(archive: bytes) -> list[str]:
    return codes.check(io.BytesIO(archive), most_bytes=MIB)


def unpack(archive: bytes, digest: str, into: Path) -> Path:
    return codes.unpack(io.BytesIO(archive), digest, into, most_bytes=MIB)


def test_a_folder_arrives_as_it_was_without_what_is_ignored(folder: Path, tmp_path: Path) -> None:
    archive = pack(folder)
    there = unpack(archive, digest_of(archive), tmp_path / "there")
    found = sorted(str(each.relative_to(there)) for each in there.rglob("*") if each.is_file())
    assert found == [".gitignore", "deep/words.txt", "scoring.py"] == sorted(check(archive))
    assert (there / "deep/words.txt").read_text() == "a\nb\n"
    assert all(not each.stat().st_mode & 0o022 for each in there.rglob("*"))


def test_the_same_files_have_the_same_digest(folder: Path) -> None:
    before = pack(folder)
    os.utime(folder / "scoring.py", (1, 1))
    (folder / "scoring.py").chmod(0o700)
    assert pack(folder) == before
    (folder / "scoring.py").write_text("def score(item): return 2.0\n")
    assert pack(folder) != before


def test_links_are_refused(folder: Path) -> None:
    """One to a folder above would be a cycle, one to elsewhere would take along what is there."""
    (folder / "deep" / "up").symlink_to(folder)
    with pytest.raises(ConfigError, match=r"code.path: .*/deep/up is not a file; links are not"):
        pack(folder)


def test_a_file_that_is_too_large_is_not_even_read(folder: Path) -> None:
    with (folder / "huge.bin").open("wb") as file:
        file.truncate(5 << 30)
    with pytest.raises(ConfigError, match=r"huge.bin: 5368\d+ bytes; at most \d+ are allowed"):
        pack(folder)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing", "no such folder or Python file"),
        ("empty", "has no files"),
        ("deep/words.txt", "has to be a Python module"),
        ("my-scoring.py", "has to be a Python module"),
    ],
)
def test_what_is_neither_a_folder_with_files_nor_a_module(
    folder: Path, name: str, says: str
) -> None:
    (folder / "empty").mkdir()
    (folder / "my-scoring.py").touch()
    with pytest.raises(ConfigError, match=f"code.path: .*{says}"):
        pack(folder / name)


def test_a_python_file_is_enough(folder: Path) -> None:
    archive = pack(folder / "scoring.py")
    assert check(archive) == ["scoring.py"]
    assert pack(folder / "scoring.py") == archive


@pytest.mark.parametrize(
    "name", ["../out.py", "/etc/passwd", "a/../../b", "a\\b.py", "./a.py", "a//b.py"]
)
def test_paths_outside_are_refused(name: str, tmp_path: Path) -> None:
    archive = zipped((name, b"x"))
    with pytest.raises(InvalidError, match="is not a plain file inside"):
        check(archive)
    with pytest.raises(InvalidError):
        unpack(archive, digest_of(archive), tmp_path / "into")
    assert not list((tmp_path / "into").iterdir())


@pytest.mark.parametrize(
    "name", ["a/" * 30_000 + "b.py", "a/" * 32 + "b.py", "a" * 200 + "/b" * 500]
)
def test_paths_that_are_too_long_or_deep_are_refused(name: str) -> None:
    with pytest.raises(InvalidError, match="too long; at most 1024 bytes and 32 parts"):
        check(zipped((name, b"x")))


def test_a_file_that_is_a_folder_too_is_refused() -> None:
    with pytest.raises(InvalidError, match="'a' is a file and a folder"):
        check(zipped(("a/b.py", b""), ("a", b"")))


def test_other_compressions_and_long_names_are_refused() -> None:
    info = zipfile.ZipInfo("a.py")
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr(info, b"x", zipfile.ZIP_LZMA)
    for each in (made.getvalue(), zipped(("x" * 256, b""))):
        with pytest.raises(InvalidError, match="is not a plain file inside"):
            check(each)


def test_modules_that_python_has_are_refused() -> None:
    spec = parse_job(
        {
            "name": "a",
            "model": {"path": "m"},
            "code": {"digest": "0" * 64},
            "tasks": {"environment": "world:ENVIRONMENT"},
            "reward": [{"kind": "python", "function": "scoring.deep:score"}],
        }
    )
    targets = [*own_targets(spec)]
    assert [*missing_modules(targets, ["world.py", "scoring/deep.py", "scoring/__init__.py"])] == []
    found = list(missing_modules(targets, ["random.py", "words.txt", "world/__init__.py"]))
    assert found == [
        "code: 'random' is a module that Python or Paceline has; rename it",
        "reward.0.options.function: module 'scoring.deep' is not in the job's code; "
        "Python files in it: random.py, world/__init__.py",
    ]


def test_links_in_archives_are_refused() -> None:
    info = zipfile.ZipInfo("link")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with pytest.raises(InvalidError, match="'link' is not a plain file"):
        check(zipped((info, b"/etc/passwd")))


def test_a_bomb_is_refused() -> None:
    with pytest.raises(InvalidError, match=r"code: \d+ bytes; at most"):
        check(zipped(("zeros", bytes(MIB + 1))))


def test_a_header_that_lies_about_the_size_is_no_way_around(tmp_path: Path) -> None:
    archive = zipped(("zeros", bytes(MIB + 1)))
    size = (MIB + 1).to_bytes(4, "little")
    lying = archive.replace(size, (10).to_bytes(4, "little"))
    assert check(lying) == ["zeros"]
    with pytest.raises(InvalidError):
        unpack(lying, digest_of(lying), tmp_path)
    assert sum(each.stat().st_size for each in tmp_path.rglob("*") if each.is_file()) == 0


def test_a_list_of_files_that_is_too_long_is_not_read() -> None:
    """It would take many times its size in memory."""
    many = zipped(*((f"{'n' * 200}{i}", b"") for i in range(20_000)))
    with pytest.raises(InvalidError, match="too many files"):
        check(many)
    at = many.rindex(b"PK\5\6")
    locator = b"PK\6\7" + bytes(16)  # of another list, as in archives of more than 4 GiB
    with pytest.raises(InvalidError, match="too many files"):
        check(zipped(("a.py", b""))[:-22] + locator + many[at:])
    with_comment = zipped(("a.py", b""))[:-2] + b"\x03\x00abc"
    assert check(with_comment) == ["a.py"]


def test_too_many_and_too_few_files() -> None:
    with pytest.raises(InvalidError, match=f"{MAX_FILES + 1} files"):
        check(zipped(*((f"f{i}", b"") for i in range(MAX_FILES + 1))))
    with pytest.raises(InvalidError, match="0 files"):
        check(zipped())


def test_another_digest(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(IntegrityError):
        unpack(pack(folder), "0" * 64, tmp_path / "into")


@given(data=st.binary(max_size=400), at=st.integers(0, 10_000))
def test_damaged_archives_are_refused_or_unpacked(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, at: int
) -> None:
    whole = zipped(("a.py", b"print(1)\n" * 50), ("b/c.txt", b"text"))
    at %= len(whole)
    damaged = whole[:at] + data + whole[at + len(data) :]
    into = tmp_path_factory.mktemp("into")
    try:
        there = unpack(damaged, digest_of(damaged), into)
    except PacelineError:
        assert not list(into.iterdir())
    else:
        assert all(into in each.resolve().parents for each in there.rglob("*"))
