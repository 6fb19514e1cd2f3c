"""What a store holds, put back later: as after the loss of what was written last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline_experience.store.store import Store


async def contents(store: Store) -> dict[bytes, bytes]:
    """All keys, as `DUMP` has them."""
    names: list[bytes] = await store.command("KEYS", "*")
    return {name: await store.command("DUMP", name) for name in names}


async def put_back(store: Store, content: Mapping[bytes, bytes]) -> None:
    """Replace all that is there."""
    async with store.redis.pipeline(transaction=False) as pipe:
        pipe.execute_command("FLUSHALL")
        for name, data in content.items():
            pipe.execute_command("RESTORE", name, 0, data)
        await pipe.execute()
