"""A single agent takes turns with the environment; one transcript per episode."""

from __future__ import annotations

from paceline.plugins import Session
from paceline.types import Transcript


async def linear(session: Session) -> tuple[Transcript, ...]:
    """Alternate policy actions and environment steps until the environment or the context ends."""
    await session.reset()
    while not session.over:
        action = await session.act()
        await session.step(action)
    return (session.transcript(),)
