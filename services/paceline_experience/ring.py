"""Pages of the trajectories that are kept for people to look at."""

from __future__ import annotations

import re

from paceline import wire
from paceline.errors import InvalidError
from paceline.types import Trajectory
from paceline.v1 import types_pb2 as pb
from paceline_experience.payloads import PayloadStore, unpack
from paceline_experience.store import Store

_TOKEN = re.compile(r"[0-9]{1,19}(\.[0-9]{1,19})?(e\+[0-9]{1,3})?")  # a place in a ring
_AT_ONCE = 8


async def page_of(
    store: Store,
    payloads: PayloadStore,
    ring: str,
    *,
    page_size: int,
    page_token: str,
    page_bytes: int,
) -> tuple[list[Trajectory], str]:
    """Trajectories of a ring, newest first, and where to go on; empty at its end.

    A page ends early with the trajectory that makes it larger than `page_bytes`.

    Raises:
        InvalidError: the token is none of this service.
    """
    if page_token and not _TOKEN.fullmatch(page_token):
        raise InvalidError(f"page_token: {page_token!r} was not given by this service")
    most = f"({page_token}" if page_token else "+inf"
    found: list[bytes] = await store.command(
        "ZREVRANGEBYSCORE", ring, most, "-inf", "LIMIT", 0, page_size
    )
    names = [name.decode() for name in found]
    items: list[Trajectory] = []
    num_bytes = 0
    for start in range(0, len(names), _AT_ONCE):
        for blob in await payloads.get(names[start : start + _AT_ONCE]):
            data = unpack(blob)
            items.append(wire.trajectory_from(pb.Trajectory.FromString(data)))
            num_bytes += len(data)
            if num_bytes >= page_bytes:
                break
        if num_bytes >= page_bytes:
            break
    if len(items) == len(names) < page_size:
        return items, ""
    last = await store.command("ZSCORE", ring, names[len(items) - 1])
    return items, repr(float(last))
