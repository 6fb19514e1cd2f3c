"""One turn after the other, no branches."""

from __future__ import annotations

from typing import Any

from paceline.types import Transcript


async def linear(episode: Any, **options: Any) -> tuple[Transcript, ...]:
    """Observe, act, step, until the environment or the context says it is over."""
    del options
    await episode.reset()
    while not episode.over:
        action = await episode.act()
        await episode.step(action)
    return (episode.transcript(),)
