"""What experience cannot do without, answers of the store, and when samples came in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from paceline.errors import PacelineError
from paceline.progress import Progress, Pulse
from paceline_experience.store import Store

ASK_S = 1.0


class Vitals:
    """Asks the store for its time, again and again."""

    def __init__(self, store: Store, *, samples: Callable[[], int], within_s: float) -> None:
        self._store = store
        self._samples = samples  # taken in since the start
        self._within_s = within_s
        self._answers = 0

    def register(self, progress: Progress) -> None:
        """Let the probes look. A restart would not bring the store back."""
        progress.watch(
            "store", lambda: Pulse(1, self._answers), fatal=False, within_s=self._within_s
        )
        progress.watch("samples", lambda: Pulse(0, self._samples()), fatal=False)

    async def run(self) -> None:
        """Ask until cancelled; a question without an answer is asked again."""
        while True:
            try:
                async with asyncio.timeout(self._within_s):
                    await self._store.now()
                self._answers += 1
            except TimeoutError:
                self._store.away = True
            except PacelineError:
                pass  # the silence tells
            await asyncio.sleep(ASK_S)
