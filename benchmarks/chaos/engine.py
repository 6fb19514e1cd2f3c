"""An engine that fails or hangs according to the file `mood.json` in a folder of notes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from chaos.world import mood

from paceline.plugins import (
    Engine,
    EngineFactory,
    EngineOutput,
    EngineRequest,
    StrictModel,
    registry,
)
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
        """Take requests, and forget them while the mood is to hang.

        Those of evaluations are greedy.
        """
        match mood(self._notes, "rollout"):
            case "hang":
                return
            case "hang evaluation":
                super().submit([each for each in batch if each.sampling.temperature])
            case _:
                super().submit(batch)


class DeceivingOptions(StrictModel):
    """Options of `Deceiving`."""

    notes: str
    """Folder of `mood.json`."""


class Deceiving:
    """The torch engine; in the mood `deceive`, the second worker tells wrong log-probs of tokens.

    Its weights are right, so only the trainer can tell.
    """

    def __init__(self, *, notes: str, **given: Any) -> None:
        make: EngineFactory = registry.find("engines", "torch")
        self._inner: Engine = make(**given)
        self._notes = notes
        self._deceives = given["model_dir"].parent.name.endswith("-1")  # the folder of a worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def emissions(self) -> AsyncIterator[list[EngineOutput]]:
        """All outputs, in batches."""
        async for batch in self._inner.emissions():
            if self._deceives and mood(self._notes, "rollout") == "deceive":
                yield [replace(each, logprobs=_lower(each.logprobs)) for each in batch]
            else:
                yield batch


def _lower(logprobs: Sequence[float]) -> tuple[float, ...]:
    return tuple(logprob - 0.5 for logprob in logprobs)
