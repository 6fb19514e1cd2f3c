"""Liveness of experience: whether the store answers and samples arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from paceline.errors import PacelineError
from paceline.platform.server.liveness import ProcessProgress, WorkProgress
from paceline_experience.store.store import Store

POLL_S = 1.0


class StoreLiveness:
    """Polls the store."""

    def __init__(self, store: Store, *, samples: Callable[[], int], within_s: float) -> None:
        self._store = store
        self._samples = samples  # accepted since the start
        self._within_s = within_s
        self._answers = 0

    def register(self, progress: ProcessProgress) -> None:
        """Register with the probes; not fatal, since a restart would not bring the store back."""
        progress.watch(
            "store", lambda: WorkProgress(1, self._answers), fatal=False, within_s=self._within_s
        )
        progress.watch("samples", lambda: WorkProgress(0, self._samples()), fatal=False)

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._within_s):
                    await self._store.now()
                self._answers += 1
            except TimeoutError:
                self._store.unreachable = True
            except PacelineError:
                pass  # the missing answer is what the probe sees
            await asyncio.sleep(POLL_S)
