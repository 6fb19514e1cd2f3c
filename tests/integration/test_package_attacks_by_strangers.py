"""Attacks by wheels and pages whose authors know the code: on names, lists, sizes and servers.

What gets in is looked at too: it lies in its folder, and nothing of it runs outside of a seal.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import stat
import tracemalloc
import zipfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest

from paceline.config.packages import PackageSettings
from paceline.errors import InvalidError, PacelineError
from paceline.isolation.code.folders import CodeFolder
from paceline.isolation.code.package_cache import PackageQuotaError
from paceline.isolation.code.packages import Packages
from paceline.isolation.code.sealed import sandbox_for, start_sealed
from paceline.platform.fair_queue import QueueOwner
from paceline_harness.packages.attack_range import Range, attack_range, rewritten, without_pip
from paceline_harness.packages.wheels import write_wheel

MIB = 1 << 20
FILE = "leaf-1.0-py3-none-any.whl"
INFO = "leaf-1.0.dist-info"
PASSWORD = "s3cr3t@of-the-index"


@pytest.fixture
async def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Range]:
    without_pip(monkeypatch)
    async with attack_range(tmp_path) as made:
        yield made


def own_wheel(target: Range, files: Mapping[str, str] | None = None, *fields: str) -> Path:
    """The wheel `leaf` of code that requires it; returns its file."""
    return write_wheel(target.code("leaf") / "wheels", "leaf", files=files, fields=fields)


def script(name: str) -> dict[str, str]:
    """Files of a wheel with a script of this name."""
    return {"leaf.py": "", f"{INFO}/entry_points.txt": f"[console_scripts]\n{name} = leaf:main\n"}


def needing(target: Range, text: str, *fields: str) -> Path:
    """The wheel `leaf`, which requires something."""
    return own_wheel(target, None, f"Requires-Dist: {text}", *fields)


def with_member(path: Path, name: str, mode: int, compression: int = zipfile.ZIP_STORED) -> None:
    """Add a member with these external attributes to a wheel."""
    with zipfile.ZipFile(path, "a") as wheel:
        info = zipfile.ZipInfo(name)
        info.external_attr, info.compress_type = mode << 16, compression
        wheel.writestr(info, b"ran")


def changed(path: Path, old: bytes, new: bytes) -> None:
    """Change bytes of a file that are in it."""
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))


def with_nul(target: Range) -> None:
    """A name that ends earlier for those who stop at a zero byte, as `leaf.py` does."""
    path = own_wheel(target)
    with_member(path, "leaf.py_evil", stat.S_IFREG)
    changed(path, b"leaf.py_evil", b"leaf.py\0evil")


def with_false_size(target: Range) -> None:
    """It says 3 bytes of a file that has 64 KiB."""
    path = own_wheel(target)
    with zipfile.ZipFile(path, "a") as wheel:
        wheel.writestr("bomb.txt", b"x" * (64 << 10), zipfile.ZIP_DEFLATED)
    changed(path, (64 << 10).to_bytes(4, "little"), (3).to_bytes(4, "little"))


def with_long_list(target: Range) -> None:
    """Comments of members, of which unpacking makes no file."""
    with zipfile.ZipFile(own_wheel(target), "a") as wheel:
        for number in range(300):
            info = zipfile.ZipInfo(f"{number}.txt")
            info.comment = b"x" * 60_000
            wheel.writestr(info, b"")


def with_zip64_list(target: Range) -> None:
    """The marker of a second end, with another list."""
    path = own_wheel(target)
    content = path.read_bytes()
    path.write_bytes(content[:-22] + b"PK\6\7" + bytes(16) + content[-22:])


def with_long(target: Range, file: str) -> None:
    """A file that is read whole, and is 20 MiB."""
    add = {f"{INFO}/{file}": b"x," * (10 * MIB)}
    rewritten(own_wheel(target), lambda members: list((members | add).items()))


REFUSED: dict[str, tuple[str, Callable[[Range], object]]] = {
    "script above": ("outside", lambda t: own_wheel(t, script("../../../../canary"))),
    "script elsewhere": ("outside", lambda t: own_wheel(t, script(str(t.canary)))),
    "script without a file": ("null byte", lambda t: own_wheel(t, script("a\0b"))),
    "data of no scheme": ("subdirectory", lambda t: own_wheel(t, {"leaf-1.0.data/lib/os.py": ""})),
    "named pipe": ("plain", lambda t: with_member(own_wheel(t), "pipe", stat.S_IFIFO | 0o666)),
    "bzip2": ("plain", lambda t: with_member(own_wheel(t), "b", stat.S_IFREG, zipfile.ZIP_BZIP2)),
    "name with NUL": ("leaf.py", with_nul),
    "false size": ("CRC", with_false_size),
    "long list": ("too many files", with_long_list),
    "zip64": ("too many files", with_zip64_list),
    "long RECORD": ("20971520 bytes", lambda t: with_long(t, "RECORD")),
    "long entry points": ("20971520 bytes", lambda t: with_long(t, "entry_points.txt")),
    "encoded address": ("METADATA", lambda t: needing(t, "=?utf-8?q?evil_=40_http=3A//h/e?=")),
    "address after a tab": ("METADATA", lambda t: needing(t, "evil", "\t@ http://h/evil.whl")),
    "address of no scheme": ("an address", lambda t: needing(t, "evil @ ../../evil-1.0.tar.gz")),
    "nested marker": ("METADATA", lambda t: needing(t, "evil; " + "(" * 5000 + "os_name")),
    "marker of no sense": ("METADATA", lambda t: needing(t, "evil; os_name ~= 'x'")),
    "marker of two texts": ("METADATA", lambda t: needing(t, "evil; 'x' in 'y'")),
    "number of 5000 digits": ("METADATA", lambda t: needing(t, "evil==" + "1" * 5000)),
}


@pytest.mark.parametrize("kind", REFUSED)
async def test_a_wheel_is_refused(target: Range, kind: str) -> None:
    why, make = REFUSED[kind]
    make(target)
    said = await target.refuses(target.code("leaf"), no_index=True)
    assert why in said
    assert len(said) < 3000


async def test_what_is_installed_lies_in_its_folder_and_is_plain(target: Range) -> None:
    """Lists of files, modes, places of data, bodies of `METADATA` and bytecode decide nothing."""
    body = f"\nRequires-Dist: evil @ {target.evil.url}\n"
    path = own_wheel(
        target,
        {
            "leaf.py": "print 'of another Python'\n",
            "__pycache__/leaf.cpython-311.pyc": "ran",
            "leaf-1.0.data/scripts/tool": "#!python\n",
            "leaf-1.0.data/headers/leaf.h": "",
            "leaf-1.0.data/purelib/pydantic-99.dist-info/METADATA": "Name: pydantic\n",
            f"{INFO}/RECORD.jws": "",
        },
        "Dynamic: Requires-Dist",
        "Provides-Extra: ../../x",
        body,
    )
    with_member(path, "setuid", stat.S_IFREG | stat.S_ISUID | stat.S_ISGID | 0o777)
    record = f"../../../canary,,\n{target.canary},,\nleaf.py,sha256=AAAA,1\n".encode()
    rewritten(path, lambda members: list((members | {f"{INFO}/RECORD": record}).items()))
    folder = await target.install(target.code("leaf"), no_index=True)
    files = [each for each in folder.rglob("*") if not each.is_dir()]
    assert {stat.S_IMODE(each.lstat().st_mode) for each in files} == {0o444}
    assert all(stat.S_ISREG(each.lstat().st_mode) for each in files)
    assert (folder / "bin" / "tool").exists()
    assert not list(folder.rglob("*.pyc"))
    assert not target.canary.exists()
    assert target.evil.asked == []


SHADOWS = (
    *(
        "sitecustomize.py",
        "usercustomize.py",
        "paceline/__init__.py",
        "paceline/platform/digest.py",
    ),
    *(
        "paceline/isolation/code/world_child.py",
        "pydantic/__init__.py",
        "typing_extensions.py",
        "json.py",
    ),
    *("_distutils_hack/__init__.py", "installer/__init__.py", "encodings/__init__.py"),
)
SHADOW = """
import builtins, pathlib
builtins.shadowed = [*getattr(builtins, "shadowed", []), __name__]
pathlib.Path({canary!r}).write_text("ran")
"""
PROBE = """
import builtins, json, sys
import paceline.platform.digest, paceline.isolation.code.world_child, pydantic, typing_extensions
import leaf

def main():
    print(json.dumps([leaf.VERSION, getattr(builtins, "shadowed", [])]), flush=True)
"""


async def test_packages_hide_nothing_of_ours_and_start_with_no_process(target: Range) -> None:
    shadow = SHADOW.format(canary=str(target.canary))
    files = {"leaf.py": "VERSION = 1\n", **dict.fromkeys(SHADOWS, shadow)}
    files["leaf.pth"] = f"import pathlib; pathlib.Path({str(target.canary)!r}).write_text('ran')\n"
    own_wheel(target, files)
    code = target.code("leaf")
    (code / "probe.py").write_text(PROBE)
    packages = await target.install(code, no_index=True)
    again = await target.install(target.code("leaf", "leaf>=1"), no_index=True)  # beside them
    assert again == packages
    sandbox = sandbox_for("paceline.isolation.code.world_child")
    try:
        process = await start_sealed(
            sandbox, CodeFolder(code, packages), "probe", memory_bytes=1 << 30
        )
        answers = asyncio.StreamReader()
        process.receive(answers.feed_data, answers.feed_eof)
        said = await answers.readline()
        await process.kill()
    finally:
        await sandbox.close()
    assert json.loads(said) == [1, []]
    assert not target.canary.exists()


async def test_wheels_that_cannot_be_read_do_not_fill_the_service(target: Range) -> None:
    code = target.code("leaf")
    for number in range(8):
        fields = ("Requires-Python: " + "x" * (3 * MIB),)
        write_wheel(code / "wheels", "leaf", f"{number}.0", fields=fields)
    assert await peak_of(target, code) < 8 * MIB


async def test_errors_of_what_unpacks_do_not_fill_the_service(target: Range) -> None:
    own_wheel(target, {"leaf.py": "", f"{INFO}/entry_points.txt": "x" * (15 * MIB)})
    assert await peak_of(target, target.code("leaf")) < 8 * MIB


async def peak_of(target: Range, code: Path) -> int:
    """Bytes that this process takes more while code is refused."""
    tracemalloc.start()
    try:
        said = await target.refuses(code, no_index=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(said) < 3000
    return peak


def test_a_name_that_stands_for_thousands_of_tags_is_not_parsed(target: Range) -> None:
    """A service would be busy with 2000 of them for minutes."""
    code, letters = target.code("leaf"), ".".join("abcdefghijklmnopqrstuvwxyz")
    (code / "wheels").mkdir()
    (code / "wheels" / f"leaf-1.0-{letters}-{letters}-{letters}.whl").write_bytes(b"")
    with pytest.raises(InvalidError, match="more than 1000 tags"):
        Packages(PackageSettings(no_index=True)).wanted(code)


@pytest.mark.parametrize("place", ["", "{}/"], ids=["files", "folders"])
async def test_empty_files_and_folders_count(target: Range, place: str) -> None:
    own_wheel(target, {f"{place.format(number)}{number}.txt": "" for number in range(260)})
    said = await target.refuses(target.code("leaf"), no_index=True, most_bytes=MIB)
    assert "more than 1048576 bytes of packages" in said


async def test_a_tenant_cannot_keep_more_sets_as_their_files_are_empty(target: Range) -> None:
    settings = PackageSettings(no_index=True, folder=target.root / "cache", tenant_bytes=MIB)
    packages = Packages(settings)
    target.made.append(packages)
    for name in ("leaf", "twig"):
        files = {f"{name}_{number}.txt": "" for number in range(150)}
        write_wheel(target.code(name, name=name) / "wheels", name, files=files)
    first, second = (packages.wanted(target.root / name) for name in ("leaf", "twig"))
    assert first is not None
    assert second is not None
    await packages.folder(first, QueueOwner("a", "1"))
    with pytest.raises(PackageQuotaError, match="tenant_bytes"):
        await packages.folder(second, QueueOwner("a", "2"))
    await packages.folder(second, QueueOwner("b", "3"))


async def test_a_wheel_that_cannot_be_read_hides_no_older_one(target: Range) -> None:
    for version in ("3.0", "2.0"):
        write_wheel(target.index.folder, "leaf", version, requires=("no ( name",))
    write_wheel(target.index.folder, "leaf", "1.0")
    folder = await target.install(target.code("leaf"))
    assert (folder / INFO).is_dir()


REDIRECTED = {
    "page": "/simple/leaf/",
    "wheel": f"/files/{FILE}",
    "metadata": f"/files/{FILE}.metadata",
}


@pytest.mark.parametrize("what", REDIRECTED)
@pytest.mark.parametrize("scheme", ["http", "file"])
async def test_a_server_leads_to_no_file_and_to_no_server_without_tls(
    target: Range, what: str, scheme: str
) -> None:
    """The file is one that may be read, as it is a wheel of the code."""
    target.index.has_metadata = True
    code = target.code("leaf")
    wheel = write_wheel(target.index.folder, "leaf")
    metadata = zipfile.ZipFile(wheel).read(f"{INFO}/METADATA")
    content = {"page": f'<a href="/files/{FILE}"></a>'.encode(), "metadata": metadata}
    wheel.with_name(f"{FILE}.metadata").write_bytes(metadata)
    stolen = code / "wheels" / "other-1.0-py3-none-any.whl"
    stolen.parent.mkdir()
    stolen.write_bytes(content.get(what, wheel.read_bytes()))
    port = target.evil.url.split(":")[2].partition("/")[0]
    path = REDIRECTED[what]
    url = stolen.as_uri() if scheme == "file" else f"http://0.0.0.0:{port}{path}"
    target.index.redirects[path] = url
    said = await target.refuses(code)
    assert "not" in said
    assert path in target.index.asked


async def test_credentials_do_not_follow_to_another_server(target: Range) -> None:
    target.index.credentials = target.evil.credentials = f"user:{PASSWORD}"
    write_wheel(target.evil.folder, "leaf")
    target.index.redirects["/simple/leaf/"] = f"{target.evil.url}/leaf/"
    code, url = target.code("leaf"), target.index.private_url
    with pytest.raises(PacelineError, match="401") as refused:
        await target.install(code, index_url=url)
    assert set(target.evil.asked) == {"/simple/leaf/"}
    assert "of-the" not in refused.value.message


@pytest.mark.parametrize("where", ["forbidden", "away"])
async def test_a_password_with_an_at_sign_is_in_no_error(target: Range, where: str) -> None:
    target.index.credentials = f"user:{PASSWORD}"
    url = target.index.private_url
    target.index.credentials = "user:another"
    if where == "away":
        url = f"http://user:{PASSWORD}@127.0.0.1:9/simple"
    said = await target.refuses(target.code("leaf"), index_url=url)
    assert "of-the" not in said
    assert "s3cr3t" not in said


PAGES = {
    "wrong MD5": '<a href="/files/{file}#md5=00"></a>',
    "wrong SHA-1": '<a href="/files/{file}#sha1=00"></a>',
    "wrong hash of metadata": '<a href="/files/{file}" data-core-metadata="sha256=00"></a>',
    "metadata that is missing": '<a href="/files/{file}" data-core-metadata="true"></a>',
    "another package": '<a href="/files/twig-1.0-py3-none-any.whl"></a>',
    "NUL in the build": '<a href="/files/leaf-1.0-1%00-py3-none-any.whl"></a>',
    "path in the build": '<a href="/files/leaf-1.0-1%2F..%2F..%2F..-py3-none-any.whl"></a>',
}


@pytest.mark.parametrize("page", PAGES)
async def test_a_page_that_lies_installs_nothing(target: Range, page: str) -> None:
    write_wheel(target.index.folder, "leaf")
    write_wheel(target.index.folder, "twig")
    target.index.page = PAGES[page].format(file=FILE).encode()
    assert "leaf" in await target.refuses(target.code("leaf"))


async def test_a_hash_holds_for_every_spelling_of_a_name_whatever_the_page_knows(
    target: Range,
) -> None:
    md5 = hashlib.md5(write_wheel(target.index.folder, "leaf").read_bytes()).hexdigest()
    target.index.page = f'<a href="/files/{FILE}#md5={md5}"></a>'.encode()
    wrong = hashlib.sha256(b"other").hexdigest()
    code = target.code(f"LEAF==1.0 --hash=sha256:{wrong}", "leaf==1.0")
    assert "which is not in requirements.txt" in await target.refuses(code)


async def test_two_workers_that_install_at_once_share_one_set_and_forgeries_have_another(
    target: Range,
) -> None:
    write_wheel(target.index.folder, "leaf")
    forged = target.code("leaf", name="forged")
    write_wheel(forged / "wheels", "leaf", files={"leaf.py": "VERSION = 'forged'"})
    honest = target.code("leaf")
    codes = (honest, forged, honest, forged)
    first, other, second, _ = await asyncio.gather(*map(target.install, codes))
    assert first == second != other
    assert "forged" not in (first / "leaf.py").read_text()
    assert target.index.asked.count(f"/files/{FILE}") == 1


async def test_folders_of_the_operator_serve_wheels(
    target: Range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What holds the fetcher leaves it all that it reads of the machine."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(target.root / "links"))
    write_wheel(target.root / "links", "leaf")
    folder = await target.install(target.code("leaf"))
    assert (folder / INFO).is_dir()
