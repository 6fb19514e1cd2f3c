"""Finds what a server has not loaded: SGLang skips tensors whose names it does not know."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import InvalidError, MisfitError, NotFoundError
from paceline.platform.telemetry.logs import Log
from paceline.plugins import WeightSnapshot
from paceline_rollout.engines.sglang.api import SglangClient

# A server computes its other tensors, such as tables of positions, by itself.
_LOADED = ("weight", "bias")
_SHOWN = 4
_IN_LAYER = re.compile(r"(?:^|\.)layers\.(\d+\.\w+)\.")
log = Log("sglang")
Checksums = list[dict[str, str]]  # of each rank, by SGLang's names


class FirstLoad:
    """The proof that a server has replaced all of the dummy weights that it starts with.

    Later loads have the same names, and the bytes of some tensors may not have changed, so only the
    first one of a server proves anything.
    """

    def __init__(self, client: SglangClient) -> None:
        self._client = client
        self._dummies: Checksums | None = None

    async def begin(self) -> None:
        """Call it before a load."""
        if self._dummies is None:
            self._dummies = await checksums_of(self._client)

    async def check(self) -> None:
        """Call it after a load that has succeeded.

        Raises:
            MisfitError: the server still has some of the weights that it started with.
        """
        kept = kept_tensors(self._dummies or [], await checksums_of(self._client))
        if kept:
            names = ", ".join(kept[:_SHOWN]) + (", ..." if len(kept) > _SHOWN else "")
            raise MisfitError(
                f"sglang: the server has not loaded {len(kept)} of its tensors, as its loader "
                f"skips names that it does not know: {names}; use another release of SGLang, or "
                "another engine"
            )


@dataclass(frozen=True, slots=True)
class _Seen:
    """A version as it was published, and as the server has it."""

    digests: dict[str, bytes]  # of the tensors of the snapshot
    sums: Checksums


class ProofByChanges:
    """The proof that a server has loaded what has changed since the proof before, and no more.

    Its names are not those of checkpoints, as it fuses tensors, and no map of them is public. But a
    checksum changes exactly with the tensor of the same name. One without such a tensor is made of
    others of the same part of its layer, so it changes if all of these have changed. The first
    proof of a server has nothing to compare with.
    """

    def __init__(self) -> None:
        self._last: _Seen | None = None

    async def unequal(
        self, client: SglangClient, snapshot: WeightSnapshot, *, loaded: Callable[[], bool]
    ) -> list[str]:
        """The server's names of tensors that are not those of the snapshot, as far as it shows.

        `loaded`: whether the server still has this snapshot.
        """
        sums = await checksums_of(client)
        seen = _Seen(await asyncio.to_thread(_digests, snapshot), sums)
        if not sums or not loaded():
            return []
        wrong = [] if self._last is None else _unequal(self._last, seen)
        if not wrong:
            self._last = seen
        return wrong


async def checksums_of(client: SglangClient) -> Checksums:
    """None at all from a release without them."""
    try:
        return await client.checksums()
    except (NotFoundError, InvalidError) as error:
        log.warning("what the server loads cannot be checked", error=error)
        return []


def _digests(snapshot: WeightSnapshot) -> dict[str, bytes]:
    return {
        entry.name: hashlib.blake2b(data, digest_size=16).digest()
        for entry, data in snapshot.tensors()
    }


def _unequal(before: _Seen, after: _Seen) -> list[str]:
    """The tensors of which a rank has other changes than the snapshots, sorted."""
    own = {name for sums in after.sums for name in sums}
    changed = {name: new != before.digests.get(name) for name, new in after.digests.items()}
    fused: dict[str, bool] = {}  # whether all that a part of a layer fuses has changed
    for name in changed.keys() - own:
        fused[_part(name)] = fused.get(_part(name), True) and changed[name]

    def is_wrong(name: str, *, kept: bool) -> bool:
        return kept == changed[name] if name in changed else kept and fused.get(_part(name), False)

    return sorted(
        {
            name
            for old, new in zip(before.sums, after.sums, strict=False)
            for name, checksum in old.items()
            if name.endswith(_LOADED) and is_wrong(name, kept=new.get(name) == checksum)
        }
    )


def _part(name: str) -> str:
    """The part of a layer that a tensor is in, such as its attention; without a layer, the name."""
    found = _IN_LAYER.search(name)
    kind = "bias" if name.endswith("bias") else "weight"
    return name if found is None else f"{found[1]} {kind}"


def kept_tensors(before: Checksums, after: Checksums) -> list[str]:
    """The tensors that are the same on a rank, sorted."""
    return sorted(
        {
            name
            for old, new in zip(before, after, strict=False)
            for name, checksum in old.items()
            if name.endswith(_LOADED) and new.get(name) == checksum
        }
    )
