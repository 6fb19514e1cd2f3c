"""The parts of this machine that containers see in place of images.

Images are not read. A container has the Python environment of this process first on its path;
`images` maps a part of an image's name to a folder of programs that comes before it. Containers run
as their `runAsUser`, unless other users cannot read the Python environment (say, in a checkout
below a home folder): then everything runs as root, and `as_root` is set.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kubernetes_double.nodes.client import Object
from kubernetes_double.nodes.kubelet.container import Bind

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_HIDDEN = ("/tmp", "/run", "/dev")
_IMAGE_USER = 65532


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Programs, files and variables that all containers have."""

    images: Mapping[str, str]
    files: tuple[Bind, ...]
    variables: Mapping[str, str]
    as_root: bool

    def environment(self, image: str) -> dict[str, str]:
        """The environment variables that the image would set."""
        first = [folder for part, folder in self.images.items() if part in image]
        path = ":".join([*first, str(Path(sys.executable).parent), _PATH])
        return {"PATH": path, "HOME": "/", "LANG": "C.UTF-8", **self.variables}

    def user(self, pod: Object, container: Object) -> tuple[int, int, tuple[int, ...]]:
        """User, group and supplementary groups; images are assumed to have their own user."""
        context = pod["spec"].get("securityContext") or {}
        own = context | (container.get("securityContext") or {})
        more = tuple(context.get("supplementalGroups", []))
        if "fsGroup" in context:
            more += (context["fsGroup"],)
        if self.as_root:
            return 0, 0, more
        user = own.get("runAsUser", _IMAGE_USER if own.get("runAsNonRoot") else 0)
        return user, own.get("runAsGroup", _IMAGE_USER if user == _IMAGE_USER else 0), more


def this_machine(
    *,
    images: Mapping[str, str],
    files: Mapping[str, str],
    variables: Mapping[str, str],
) -> Machine:
    """`files`: paths on this machine and in containers, as if they were in the images."""
    needed = [Path(path).resolve() for path in _python_paths()]
    binds = [Bind(str(path), str(path), read_only=True) for path in needed if _is_hidden(path)]
    binds += [Bind(str(Path(here).resolve()), there, True) for here, there in files.items()]
    as_root = not all(_is_open(path) for path in needed)
    return Machine(images=images, files=tuple(binds), variables=variables, as_root=as_root)


def _python_paths() -> Sequence[str]:
    places = [sys.prefix, sys.base_prefix, *sys.path]
    return sorted({place for place in places if place and os.path.exists(place)})


def _is_hidden(path: Path) -> bool:
    """Whether the root's overlay hides a path: another file system, or a masked folder."""
    masked = any(path.is_relative_to(place) for place in _HIDDEN)
    return masked or path.stat().st_dev != Path("/").stat().st_dev


def _is_open(path: Path) -> bool:
    """Whether every user may enter."""
    needed = stat.S_IXOTH | stat.S_IROTH
    inside = path.stat().st_mode & needed == needed or path.is_file()
    return inside and all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents)
