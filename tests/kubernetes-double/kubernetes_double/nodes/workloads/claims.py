"""PersistentVolumeClaims: each is bound immediately to its own folder, removed with the claim."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from kubernetes_double.nodes.client import CLAIM, Kind, Object
from kubernetes_double.nodes.informer import Informer, Key, key_of
from kubernetes_double.nodes.loop import Loop


class Claims:
    """The controller of claims; `folder` holds the volumes."""

    def __init__(self, informer: Informer, *, folder: Path) -> None:
        self._informer = informer
        self._folder = folder
        self._gone: dict[Key, str] = {}
        self.loop = Loop(informer, sync=self.sync, keys_of=self._keys_of)

    async def sync(self, key: Key) -> None:
        """Bind a claim, or remove the folder of a deleted one."""
        if uid := self._gone.pop(key, ""):
            await asyncio.to_thread(shutil.rmtree, self._folder / key[0] / uid, ignore_errors=True)
        claim = self._informer.get(CLAIM, key)
        if claim is None or claim.get("status", {}).get("phase") == "Bound":
            return
        status = {
            "phase": "Bound",
            "accessModes": claim["spec"].get("accessModes", []),
            "capacity": claim["spec"].get("resources", {}).get("requests", {}),
        }
        name = f"pvc-{claim['metadata']['uid']}"
        claim = await self._informer.patch(CLAIM, claim, {"spec": {"volumeName": name}})
        await self._informer.patch(CLAIM, claim, {"status": status}, status=True)

    def _keys_of(self, kind: Kind, item: Object) -> list[Key]:
        if kind is not CLAIM:
            return []
        if item.get("deleted"):
            self._gone[key_of(item)] = item["metadata"]["uid"]
        return [key_of(item)]
