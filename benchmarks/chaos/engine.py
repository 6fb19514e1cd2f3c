"""An engine that fails or hangs according to the file `mood.json` in a folder of notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from chaos.world import mood

from paceline.plugins import EngineRequest, StrictModel
from paceline_rollout.engines.simulated import SimulatedEngine


class MoodyOptions(StrictModel):
    """Options of `Moody`."""

    notes: str
    """Folder of `mood.json`."""
    fails: Literal["", "import", "memory", "flag"] = ""
    """As what its start fails."""


class Moody(SimulatedEngine):
    """The simulated engine, until its mood is another."""

    def __init__(self, *, notes: str, fails: str = "", **given: Any) -> None:
        super().__init__(**given)
        self._notes = notes
        self._fails = fails

    async def start(self) -> None:
        """Fail as engines do, if it is told to."""
        match self._fails:
            case "import":
                raise ModuleNotFoundError("No module named 'chaos_kernels'")
            case "memory":
                raise MemoryError("cannot allocate the weights of chaos")
            case "flag":
                raise SystemExit("chaos: error: unrecognized arguments: --chaos")
            case _:
                await super().start()

    def submit(self, batch: Sequence[EngineRequest]) -> None:
        """Take requests, and forget them while the mood is to hang."""
        if mood(self._notes, "rollout") != "hang":
            super().submit(batch)
