"""Files that every sealed process may read."""

from __future__ import annotations

import sysconfig
from pathlib import Path

_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache")
_OTHERS = ("/usr/share/zoneinfo", "/etc/localtime", "/dev/zero", "/dev/urandom", "/dev/random")


def interpreter() -> list[Path]:
    """The folders of the standard library and of installed packages."""
    paths = sysconfig.get_paths()
    found = [Path(paths[name]).resolve() for name in ("stdlib", "purelib")]
    return [path for path in found if path.is_dir()]


def read_by_python() -> list[Path]:
    """What the interpreter, installed packages and libraries of the system read."""
    return [*interpreter(), *map(Path, _LIBRARIES + _OTHERS)]
