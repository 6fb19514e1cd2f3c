"""A topology: drives an episode from its first observation to its transcripts."""

from __future__ import annotations

from paceline.plugins import Session
from paceline.types import Transcript


async def stripped(session: Session, *, of: str = " \n") -> tuple[Transcript, ...]:
    """Alternate turns; strips the characters `of` from each action before the world sees it.

    Training uses the tokens as sampled, regardless of what the world sees.
    """
    await session.reset()
    while not session.over:
        await session.step((await session.act()).strip(of))
    return (session.transcript(),)
