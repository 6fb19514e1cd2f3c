"""The volumes of a pod as folders on this machine."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kubernetes_double.errors import NotFoundError
from kubernetes_double.nodes.client import CLAIM, CONFIG_MAP, SECRET, Object
from kubernetes_double.nodes.kubelet.container import Bind
from kubernetes_double.nodes.kubelet.environment import Lookup, contents, field_of

_MODE = 0o644
_GROUP_MAY_READ = 0o440
TOKENS = "/var/run/secrets/kubernetes.io/serviceaccount"


@dataclass(frozen=True, slots=True)
class File:
    """A file in a volume."""

    data: bytes
    mode: int = _MODE


Files = dict[str, File]


@dataclass(frozen=True, slots=True, kw_only=True)
class Volumes:
    """The volumes of one pod, below `folder`; those of claims are below `claims`.

    `tokens` are the pod's ServiceAccount tokens by audience ("" for the API server).
    """

    folder: Path
    claims: Path
    lookup: Lookup
    tokens: Mapping[str, str]

    def provide(self, pod: Object) -> None:
        """Create or update every volume.

        Raises:
            NotFoundError: the source of a volume does not exist (yet).
        """
        group = pod["spec"].get("securityContext", {}).get("fsGroup")
        for volume in pod["spec"].get("volumes", []):
            path = self._path(pod, volume)
            files = self._files(pod, volume)
            path.mkdir(parents=True, exist_ok=True)
            if files is not None:
                publish(path, files, group=group)
            elif "hostPath" not in volume:
                _open_to(path, group=group, everyone="emptyDir" in volume)

    def binds(self, pod: Object, container: Object) -> list[Bind]:
        """The mounts of a container, outer folders first."""
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        mounts = sorted(container.get("volumeMounts", []), key=lambda m: m["mountPath"].count("/"))
        return [self._bind(pod, volumes[mount["name"]], mount) for mount in mounts]

    def _bind(self, pod: Object, volume: Object, mount: Object) -> Bind:
        source = self._path(pod, volume)
        shown = any(kind in volume for kind in ("secret", "configMap", "projected", "downwardAPI"))
        if part := mount.get("subPath"):
            source = source / part
            if not shown:
                source.mkdir(parents=True, exist_ok=True)
            elif not source.exists():
                raise NotFoundError(f"volume {volume['name']!r} has no {part!r}")
        read_only = bool(mount.get("readOnly")) or shown
        return Bind(str(source.resolve()), mount["mountPath"].rstrip("/"), read_only)

    def _path(self, pod: Object, volume: Object) -> Path:
        if "persistentVolumeClaim" in volume:
            name = volume["persistentVolumeClaim"]["claimName"]
            claim = self.lookup(CLAIM, name)
            if claim is None or claim.get("status", {}).get("phase") != "Bound":
                raise NotFoundError(f"persistentvolumeclaim {name!r} is not bound")
            return self.claims / pod["metadata"]["namespace"] / claim["metadata"]["uid"]
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        return self.folder / volume["name"]

    def _files(self, pod: Object, volume: Object) -> Files | None:
        """The files of a volume; None for a folder that containers write to."""
        known = {"secret", "configMap", "downwardAPI", "projected"}
        kind = next((kind for kind in volume if kind in known), None)
        if kind is None:
            return None
        source = volume[kind]
        mode = source.get("defaultMode", _MODE)
        if kind != "projected":
            return self._shown(pod, kind, source, mode)
        found: Files = {}
        for entry in source.get("sources", []):
            for inner, content in entry.items():
                found.update(self._shown(pod, inner, content, mode))
        return found

    def _shown(self, pod: Object, kind: str, source: Object, mode: int) -> Files:
        if kind == "serviceAccountToken":
            return {source["path"]: File(self.tokens[source.get("audience", "")].encode())}
        if kind == "downwardAPI":
            return {
                item["path"]: File(field_of(pod, item["fieldRef"]["fieldPath"]).encode(), mode)
                for item in source.get("items", [])
            }
        content = contents(SECRET if kind == "secret" else CONFIG_MAP, source, lookup=self.lookup)
        items = source.get("items")
        if not items:
            return {key: File(data, mode) for key, data in content.items()}
        missing = [item["key"] for item in items if item["key"] not in content]
        if missing and not source.get("optional"):
            raise NotFoundError(f"{kind} {source.get('name', '')!r} has no key {missing[0]!r}")
        return {
            item["path"]: File(content[item["key"]], item.get("mode", mode))
            for item in items
            if item["key"] in content
        }


def audiences_of(pod: Object) -> list[str]:
    """Audiences of the ServiceAccount tokens in the pod's volumes."""
    return [
        source["serviceAccountToken"].get("audience", "")
        for volume in pod["spec"].get("volumes", [])
        for source in volume.get("projected", {}).get("sources", [])
        if "serviceAccountToken" in source
    ]


def publish(folder: Path, files: Files, *, group: int | None) -> None:
    """Replace the contents of a folder atomically, by swapping the link `..data`.

    Files and folders that a reader has open stay unchanged.
    """
    if _published(folder) == {name: file.data for name, file in files.items()}:
        return
    made = folder / f"..{secrets.token_hex(6)}"
    made.mkdir()
    made.chmod(0o755)
    for name, file in files.items():
        path = made / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.data)
        if group is not None:
            os.chown(path, -1, group)
        path.chmod(file.mode | (_GROUP_MAY_READ if group is not None else 0))
    data, fresh = folder / "..data", folder / "..data_tmp"
    before = data.resolve() if data.is_symlink() else None
    fresh.symlink_to(made.name)
    fresh.replace(data)
    tops = {name.split("/")[0] for name in files}
    for top in tops:
        if not (folder / top).is_symlink():
            (folder / top).symlink_to(f"..data/{top}")
    for path in folder.iterdir():
        if not path.name.startswith("..") and path.name not in tops:
            path.unlink()
    if before is not None:
        shutil.rmtree(before, ignore_errors=True)


def _published(folder: Path) -> dict[str, bytes] | None:
    data = folder / "..data"
    if not data.is_symlink():
        return None
    paths = [path for path in data.rglob("*") if path.is_file()]
    return {str(path.relative_to(data)): path.read_bytes() for path in paths}


def _open_to(path: Path, *, group: int | None, everyone: bool) -> None:
    if everyone:
        path.chmod(0o777)
    if group is not None:
        os.chown(path, -1, group)
        path.chmod(path.stat().st_mode | 0o2770)
