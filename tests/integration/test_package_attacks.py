"""Wheels and folders that try to run code, reach addresses or change what other jobs get.

An attack is seen by a file that code of its source package writes, and by what servers are asked.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator, Callable, Sequence
from io import BytesIO
from pathlib import Path

import psutil
import pytest

from paceline.isolation.child import ERROR, ID, OP
from paceline.isolation.code.install import FETCHER, UNPACKER, InstallError
from paceline.isolation.code.wheels.messages import HANDLE
from paceline.isolation.frames import frame, messages
from paceline_harness.packages.attack_range import (
    BACKEND,
    METADATA,
    PYPROJECT,
    Range,
    attack_range,
    rewritten,
    without_pip,
    write_sdist,
)
from paceline_harness.packages.wheels import write_wheel

MIB = 1 << 20
SECRET = "s3cr3t-of-the-index"
UNREACHABLE = "http://127.0.0.1:9/simple"


@pytest.fixture(autouse=True)
def no_configuration_of_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    without_pip(monkeypatch)


@pytest.fixture
async def target(tmp_path: Path) -> AsyncIterator[Range]:
    async with attack_range(tmp_path) as made:
        yield made


def repository(target: Range) -> Path:
    """A repository with the source package."""
    folder = target.root / "repository"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "backend.py").write_text(BACKEND.format(canary=str(target.canary)))
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "x")):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def http(target: Range) -> str:
    return target.evil.url.replace("/simple", "/files/evil-1.0.tar.gz")


ADDRESSES: dict[str, Callable[[Range], str]] = {
    "http": http,
    "http with a fragment": lambda target: f"{http(target)}#egg=evil",
    "file": lambda target: (target.evil.folder / "evil-1.0.tar.gz").as_uri(),
    "file without a host": lambda target: f"file:{target.evil.folder}/evil-1.0.tar.gz",
    "path": lambda target: str(target.evil.folder / "evil-1.0.tar.gz"),
    "repository": lambda target: f"git+{repository(target).as_uri()}",
}


@pytest.mark.parametrize("address", ADDRESSES)
async def test_a_wheel_of_a_job_cannot_require_an_address(target: Range, address: str) -> None:
    code = target.code("leaf")
    write_wheel(code / "wheels", "leaf", requires=(f"evil @ {ADDRESSES[address](target)}",))
    assert "leaf-1.0-py3-none-any.whl" in await target.refuses(code)
    assert "leaf-1.0-py3-none-any.whl" in await target.refuses(code, no_index=True)


Place = Callable[[Range, str], Sequence[str]]


def _own_at_depth_2(target: Range, url: str) -> Sequence[str]:
    write_wheel(target.code() / "wheels", "leaf", requires=("branch>=1",))
    write_wheel(target.code() / "wheels", "branch", requires=(f"evil @ {url}",))
    return ("leaf",)


def _of_the_index(target: Range, url: str) -> Sequence[str]:
    write_wheel(target.index.folder, "leaf", requires=(f"evil @ {url}",))
    return ("leaf",)


def _of_the_index_at_depth_2(target: Range, url: str) -> Sequence[str]:
    write_wheel(target.code() / "wheels", "leaf", requires=("branch",))
    write_wheel(target.index.folder, "branch", requires=("twig",))
    write_wheel(target.index.folder, "twig", requires=(f"evil @ {url}",))
    return ("leaf",)


def _in_an_extra(target: Range, url: str) -> Sequence[str]:
    fields = ("Provides-Extra: more",)
    needs = (f'evil @ {url} ; extra == "more"',)
    write_wheel(target.code() / "wheels", "leaf", requires=needs, fields=fields)
    return ("leaf[more]",)


def _in_an_extra_of_another(target: Range, url: str) -> Sequence[str]:
    _in_an_extra(target, url)
    write_wheel(target.index.folder, "branch", requires=("leaf[more]",))
    return ("branch",)


def _behind_a_marker(target: Range, url: str) -> Sequence[str]:
    needs = (f'evil @ {url} ; python_version >= "3"',)
    write_wheel(target.code() / "wheels", "leaf", requires=needs)
    return ("leaf",)


def _behind_a_marker_that_fails(target: Range, url: str) -> Sequence[str]:
    needs = (f'evil @ {url} ; python_version < "3"',)
    write_wheel(target.code() / "wheels", "leaf", requires=needs)
    return ("leaf",)


def _in_a_later_version(target: Range, url: str) -> Sequence[str]:
    write_wheel(target.code() / "wheels", "leaf", "1.0")
    write_wheel(target.index.folder, "leaf", "2.0", requires=(f"evil @ {url}",))
    return ("leaf",)


def _only_beside_the_wheel(target: Range, url: str) -> Sequence[str]:
    target.index.has_metadata = True
    path = write_wheel(target.index.folder, "leaf")
    needs = METADATA.format(name="leaf", version="1.0") + f"Requires-Dist: evil @ {url}\n"
    path.with_name(f"{path.name}.metadata").write_text(needs)
    return ("leaf",)


def _not_beside_the_wheel(target: Range, url: str) -> Sequence[str]:
    target.index.has_metadata = True
    path = write_wheel(target.index.folder, "leaf", requires=(f"evil @ {url}",))
    beside = path.with_name(f"{path.name}.metadata")
    beside.write_text(METADATA.format(name="leaf", version="1.0"))
    return ("leaf",)


def _in_a_folded_line(target: Range, url: str) -> Sequence[str]:
    write_wheel(target.code() / "wheels", "leaf", fields=("requires-dist: evil", f"  @ {url}"))
    return ("leaf",)


PLACES: dict[str, Place] = {
    place.__name__.removeprefix("_"): place
    for place in (
        *(_own_at_depth_2, _of_the_index, _of_the_index_at_depth_2, _in_an_extra),
        *(_in_an_extra_of_another, _behind_a_marker, _behind_a_marker_that_fails),
        *(_in_a_later_version, _only_beside_the_wheel, _not_beside_the_wheel, _in_a_folded_line),
    )
}


@pytest.mark.parametrize("place", PLACES)
async def test_no_wheel_at_any_depth_can_require_an_address(target: Range, place: str) -> None:
    target.code()
    code = target.code(*PLACES[place](target, http(target)))
    said = await target.refuses(code)
    assert "from an address" in said or "METADATA" in said


INFO = "leaf-1.0.dist-info"
EVIL = b"Metadata-Version: 2.1\nName: leaf\nVersion: 1.0\nRequires-Dist: evil @ {url}\n"
Members = list[tuple[str, bytes]]
WHEELS: dict[str, Callable[[dict[str, bytes], bytes], Members]] = {
    "METADATA twice, the last one evil": lambda m, evil: [*m.items(), (f"{INFO}/METADATA", evil)],
    "METADATA twice, the first one evil": lambda m, evil: [(f"{INFO}/METADATA", evil), *m.items()],
    "WHEEL twice": lambda m, evil: [*m.items(), (f"{INFO}/WHEEL", m[f"{INFO}/WHEEL"])],
    "a file twice": lambda m, evil: [*m.items(), ("leaf.py", b"")],
    "no METADATA": lambda m, evil: [each for each in m.items() if "METADATA" not in each[0]],
    "no WHEEL": lambda m, evil: [each for each in m.items() if "WHEEL" not in each[0]],
    "two dist-infos": lambda m, evil: [*m.items(), ("evil-1.0.dist-info/METADATA", evil)],
    "two dist-infos, one in capitals": lambda m, evil: [
        *m.items(),
        ("leaf-1.0.DIST-INFO/METADATA", evil),
    ],
    "the dist-info of another name": lambda m, evil: [
        (name.replace("leaf-1.0.dist", "other-1.0.dist"), text) for name, text in m.items()
    ],
    "the dist-info of another version": lambda m, evil: [
        (name.replace("leaf-1.0.dist", "leaf-2.0.dist"), text) for name, text in m.items()
    ],
    "METADATA of another name": lambda m, evil: [
        (name, text.replace(b"Name: leaf", b"Name: other")) for name, text in m.items()
    ],
    "METADATA of another version": lambda m, evil: [
        (name, text.replace(b"\nVersion: 1.0", b"\nVersion: 2.0")) for name, text in m.items()
    ],
    "METADATA with two names": lambda m, evil: [
        (name, text.replace(b"Name: leaf", b"Name: leaf\nName: other")) for name, text in m.items()
    ],
    "METADATA that is no text": lambda m, evil: [
        (name, b"Name: leaf\nVersion: 1.0\nRequires-Dist: \xff\xfe" if "META" in name else text)
        for name, text in m.items()
    ],
    "a path above": lambda m, evil: [*m.items(), ("../../canary", b"ran")],
    "a path above, from a folder of data": lambda m, evil: [
        *m.items(),
        ("leaf-1.0.data/data/../../../../canary", b"ran"),
    ],
    "an absolute path": lambda m, evil: [*m.items(), ("{canary}", b"ran")],
    "an absolute path in a folder of data": lambda m, evil: [
        *m.items(),
        ("leaf-1.0.data/data//{canary}", b"ran"),
    ],
    "a path of Windows": lambda m, evil: [*m.items(), ("..\\..\\canary", b"ran")],
    "a file that is a folder too": lambda m, evil: [*m.items(), ("leaf.py/evil.py", b"")],
}


# Wheels of both places are read by the same function: one of the index shows that it is called.
OF_THE_INDEX = pytest.param(False, id="index", marks=pytest.mark.extended)


@pytest.mark.parametrize("kind", WHEELS)
@pytest.mark.parametrize("is_own", [pytest.param(True, id="own"), OF_THE_INDEX])
async def test_a_wheel_that_is_not_what_it_says_is_refused(
    target: Range, kind: str, is_own: bool
) -> None:
    code = target.code("leaf")
    evil = EVIL.replace(b"{url}", http(target).encode())

    def change(members: dict[str, bytes]) -> Members:
        changed = WHEELS[kind](members, evil)
        return [(name.replace("{canary}", str(target.canary)), text) for name, text in changed]

    rewritten(write_wheel(code / "wheels" if is_own else target.index.folder, "leaf"), change)
    assert "leaf-1.0-py3-none-any.whl" in await target.refuses(code)


async def test_a_wheel_of_the_index_is_read_too(target: Range) -> None:
    path = write_wheel(target.index.folder, "leaf")
    evil = EVIL.replace(b"{url}", http(target).encode())
    rewritten(path, lambda members: WHEELS["METADATA twice, the last one evil"](members, evil))
    assert path.name in await target.refuses(target.code("leaf"))


async def test_a_link_in_a_wheel_is_refused(target: Range) -> None:
    code = target.code("leaf")
    path = write_wheel(code / "wheels", "leaf")
    with zipfile.ZipFile(path, "a") as wheel:
        info = zipfile.ZipInfo("leaf_link")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        wheel.writestr(info, str(target.root))
    assert "leaf_link" in await target.refuses(code)


async def test_a_wheel_that_unpacks_to_too_much_is_refused_before_it_is_unpacked(
    target: Range,
) -> None:
    code = target.code("leaf", "branch")
    for name in ("leaf", "branch"):
        write_wheel(code / "wheels", name, files={f"{name}.txt": "x" * (700 << 10)})
    assert "more than 1048576 bytes of packages" in await target.refuses(code, most_bytes=MIB)
    packed = write_wheel(code / "wheels", "leaf", files={"leaf.txt": "x" * (2 * MIB)})
    assert "more than 1048576 bytes" in await target.refuses(code, most_bytes=MIB)
    with zipfile.ZipFile(packed) as wheel:
        members = {name: wheel.read(name) for name in wheel.namelist()}
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in members.items():
            wheel.writestr(name, content)
    assert packed.stat().st_size < MIB
    assert "at most 1048576 are allowed" in await target.refuses(code, most_bytes=MIB)


async def test_a_page_among_the_wheels_of_a_job_is_not_read(target: Range) -> None:
    code = target.code("leaf")
    write_wheel(target.evil.folder, "leaf", "9.0")
    url = target.evil.url.replace("/simple", "/files/leaf-9.0-py3-none-any.whl")
    write_wheel(code / "wheels", "other")
    for name in ("index.html", "leaf.html"):
        (code / "wheels" / name).write_text(f'<a href="{url}">leaf-9.0-py3-none-any.whl</a>')
    assert "No matching distribution found for leaf" in await target.refuses(code, no_index=True)


async def test_a_page_among_the_wheels_does_not_change_what_another_job_gets(
    target: Range,
) -> None:
    honest, forged = target.code("leaf", name="honest"), target.code("leaf", name="forged")
    for code in (honest, forged):
        write_wheel(code / "wheels", "leaf", "1.0")
    write_wheel(target.evil.folder, "leaf", "9.0")
    url = target.evil.url.replace("/simple", "/files/leaf-9.0-py3-none-any.whl")
    page = f'<a href="{url}">leaf-9.0-py3-none-any.whl</a>'
    (forged / "wheels" / "index.html").write_text(page)
    await target.install(forged, no_index=True)
    found = await target.install(honest, no_index=True)
    assert [each.name for each in found.glob("*.dist-info")] == ["leaf-1.0.dist-info"]
    assert target.evil.asked == []


@pytest.mark.parametrize("place", ["sub/leaf.whl", "link", "linked folder", "source", "named"])
async def test_only_plain_wheels_in_the_folder_itself_are_taken(target: Range, place: str) -> None:
    code = target.code("leaf")
    elsewhere = write_wheel(target.root / "elsewhere", "leaf")
    wheels = code / "wheels"
    if place == "linked folder":
        wheels.symlink_to(elsewhere.parent)
    else:
        wheels.mkdir()
    if place == "sub/leaf.whl":
        (wheels / "sub").mkdir()
        shutil.copy(elsewhere, wheels / "sub")
    elif place == "link":
        (wheels / elsewhere.name).symlink_to(elsewhere)
    elif place == "source":
        write_sdist(wheels, target.canary, "leaf")
    elif place == "named":
        write_sdist(wheels, target.canary, "leaf").rename(wheels / elsewhere.name)
    said = await target.refuses(code, no_index=True)
    assert "leaf" in said


async def test_a_source_package_of_the_index_is_not_built(target: Range) -> None:
    write_sdist(target.index.folder, target.canary, "leaf")
    assert "No matching distribution found for leaf" in await target.refuses(target.code("leaf"))


async def test_a_page_of_the_index_leads_to_no_file_of_this_machine(target: Range) -> None:
    write_wheel(target.evil.folder, "leaf")
    secret = (target.evil.folder / "leaf-1.0-py3-none-any.whl").as_uri()
    pages = target.root / "pages" / "simple" / "leaf"
    pages.mkdir(parents=True)
    (pages / "index.html").write_text(f'<a href="{secret}">leaf-1.0-py3-none-any.whl</a>')
    url = (target.root / "pages" / "simple").as_uri()
    said = await target.refuses(target.code("leaf"), index_url=url)
    assert "No matching distribution found for leaf" in said


async def test_what_is_installed_is_named_by_every_byte_of_it(target: Range) -> None:
    """Other wheels of the same name and version are another set, wherever they come from."""
    write_wheel(target.index.folder, "leaf", files={"leaf.py": "VERSION = 'index'"})
    from_index = await target.install(target.code("leaf"))
    own = target.code("leaf", name="own")
    write_wheel(own / "wheels", "leaf", files={"leaf.py": "VERSION = 'own'"})
    from_own = await target.install(own)
    assert from_index != from_own
    assert (from_index / "leaf.py").read_text() == "VERSION = 'index'"
    # Other requirements that lead to the same wheels share them.
    assert await target.install(target.code("leaf==1.0", name="pinned")) == from_index


async def test_the_order_of_requirements_changes_nothing_in_a_set(target: Range) -> None:
    """Else a job with the same wheels could decide whose file another job gets."""
    found: list[Path] = []
    for names in (("leaf", "branch"), ("branch", "leaf")):
        code = target.code(*names, name=f"of-{names[0]}")
        for name in names:
            write_wheel(code / "wheels", name, files={"shared.py": f"OF = {name!r}"})
        folder = target.root / f"cache-{names[0]}"
        found.append(await target.install(code, folder=folder, no_index=True))
    assert found[0].name == found[1].name
    assert len({(each / "shared.py").read_text() for each in found}) == 1


async def seen_while(task: asyncio.Task[Path]) -> str:
    """Arguments and environments of all processes below this one until a task ends."""
    seen = set[str]()
    while not task.done():
        for process in psutil.Process().children(recursive=True):
            try:
                seen |= {*process.cmdline(), *map("=".join, process.environ().items())}
            except (psutil.Error, OSError):
                continue
        await asyncio.sleep(0.005)
    return "\n".join(seen)


async def test_credentials_of_the_index_are_in_no_error_argument_environment_or_file(
    target: Range, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.index.credentials = f"user:{SECRET}"
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", target.index.private_url)
    write_wheel(target.index.folder, "leaf")
    settings = {"index_url": target.index.private_url}
    task = asyncio.create_task(target.install(target.code("leaf"), **settings))
    seen = await seen_while(task)
    found = await task
    assert SECRET not in seen
    texts = [each.read_bytes() for each in found.parent.rglob("*") if each.is_file()]
    assert not [each for each in texts if SECRET.encode() in each]
    assert target.index.asked
    missing = await target.refuses(target.code("nowhere", name="missing"), **settings)
    target.index.credentials = "user:another"
    forbidden = await target.refuses(target.code("leaf<9", name="forbidden"), **settings)
    closed = f"http://user:{SECRET}@127.0.0.1:9/simple"
    away = await target.refuses(target.code("leaf<8", name="away"), index_url=closed)
    assert SECRET not in missing + forbidden + away
    assert "401" in forbidden


SEALED = """
import os, socket, sys, threading
from pathlib import Path
from paceline.isolation.sandbox.hold import Hold

inside, secret, port = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
has_network = sys.argv[4] == "yes"
Hold(os.getppid(), 1 << 20, 10).apply(readable=[], changed=inside, has_network=has_network)

def fails(attack, *arguments):
    try:
        attack(*arguments)
    except OSError:
        return True
    return False

outside = Path(secret).parent / "written"
print(fails(open, secret), fails(open, "/etc/passwd"), fails(outside.write_text, "x"))
print(fails(Path(secret).unlink), fails(os.kill, os.getppid(), 0), fails(os.listdir, "/proc/self"))
print(fails(os.symlink, secret, inside / "link") or fails(open, inside / "link"))
(inside / "written").write_text("x")
print(not fails(socket.create_connection, ("127.0.0.1", int(port))) == has_network)
print(has_network or fails(os.fork) and fails(os.execv, "/bin/true", ["true"]))
"""


@pytest.mark.parametrize("has_network", [True, False], ids=["fetcher", "unpacker"])
def test_what_handles_wheels_reaches_nothing_else(
    target: Range, tmp_path: Path, has_network: bool
) -> None:
    inside, secret = tmp_path / "inside", tmp_path / "token"
    inside.mkdir()
    secret.write_text("secret")
    port = target.evil.url.split(":")[2].partition("/")[0]
    arguments = [str(inside), str(secret), port, "yes" if has_network else "no"]
    said = subprocess.run(
        [sys.executable, "-I", "-c", SEALED, *arguments], capture_output=True, text=True
    )
    assert (set(said.stdout.split()), said.stderr) == ({"True"}, "")
    assert secret.exists()
    assert (inside / "written").exists()


WITHOUT_LANDLOCK = """
import errno, runpy, sys
import pyseccomp as lib

calls = lib.SyscallFilter(lib.ALLOW)
calls.add_rule(lib.ERRNO(errno.ENOSYS), "landlock_create_ruleset")
calls.load()
runpy.run_module(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize("module", [FETCHER, UNPACKER])
def test_where_nothing_contains_it_no_package_is_handled(tmp_path: Path, module: str) -> None:
    hold = {"parent": os.getpid(), "file_bytes": MIB, "cpu_s": 60}
    request: dict[str, object] = {"into": str(tmp_path), "hold": hold, "wheels": [], "own": []}
    request |= {"requirements": ["leaf"], "constraints": [], "sources": {}, "most_bytes": MIB}
    said = subprocess.run(
        [sys.executable, "-c", WITHOUT_LANDLOCK, module],
        input=frame({ID: 0, OP: HANDLE, "request": request}),
        capture_output=True,
    )
    assert said.stderr == b""
    (answer,) = messages(BytesIO(said.stdout))
    assert "no Landlock" in answer.fields[ERROR]


async def test_an_installed_set_needs_no_index(target: Range) -> None:
    write_wheel(target.index.folder, "leaf")
    code = target.code("leaf")
    found = await target.install(code)
    asked = len(target.index.asked)
    assert await target.install(code) == found
    assert len(target.index.asked) == asked
    with pytest.raises(InstallError, match=r"127\.0\.0\.1:9.*No matching distribution"):
        await target.install(code, index_url=UNREACHABLE)
