"""Finds the rank that the others wait for: in a collective, all of them stand."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

from paceline.enums import Phase
from paceline.errors import UnavailableError
from paceline.platform.server.phase_report import PhaseReport
from paceline.platform.telemetry.logs import Log
from paceline.types import WorkerPhase
from paceline_trainer.ranks.distributed import Noticeboard
from paceline_trainer.ranks.rank_info import RankInfo

NOTICE = "paceline/phase"
EVERY_S = 1.0
_ORDER = tuple(
    str(phase)
    for phase in (
        Phase.DOWNLOADING_MODEL,
        Phase.LOADING_MODEL,
        Phase.LOADING_CHECKPOINT,
        Phase.WAITING_FOR_BATCH,
        Phase.STEPPING,
        Phase.COMMITTING,
        Phase.CHECKPOINTING,
        Phase.PUBLISHING,
        Phase.FINISHED,
    )
)
"""Of the phases of one step; those before the first have no number."""
_TORCH = f"{os.sep}torch{os.sep}"
_COLLECTIVES = f"{_TORCH}distributed{os.sep}"
log = Log("laggard")


@dataclass(frozen=True, slots=True)
class RankPhase:
    """What a rank is at."""

    name: str
    number: int
    done: float
    total: float
    longest_s: float
    marks: int
    in_collective: bool  # of its thread that computes

    @classmethod
    def of(cls, report: PhaseReport, *, in_collective: bool) -> RankPhase:
        """As this rank reports it."""
        now = report.now
        return cls(
            now.name, now.number, now.done, now.total, now.longest_s, report.marks, in_collective
        )

    @property
    def place(self) -> tuple[float, ...]:
        """How far it is: all ranks pass the same places in the same order."""
        finished = self.name == Phase.FINISHED
        order = _ORDER.index(self.name) if self.name in _ORDER else -1
        return (finished, self.number, order, self.marks, self.done)

    @property
    def phase(self) -> WorkerPhase:
        """For the roster."""
        return WorkerPhase(self.name, self.number, self.done, self.total, longest_s=self.longest_s)


def laggard(ranks: Mapping[int, RankPhase]) -> int | None:
    """The rank that the others wait for; None: they are equally far, as far as can be seen.

    It is the one that is least far, and of those the one that is in no collective.
    """
    least = min((each.place for each in ranks.values()), default=())
    behind = [rank for rank, each in ranks.items() if each.place == least]
    apart = [rank for rank in behind if not ranks[rank].in_collective]
    if len(behind) == len(ranks) and len(apart) in (0, len(ranks)):
        return None
    return min(apart or behind)


def in_collective(thread: int) -> bool:
    """Whether a thread waits in a collective: torch's functions for them, and what these call."""
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and _TORCH in frame.f_code.co_filename:
        if _COLLECTIVES in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


class RankPhases:
    """Shows what this rank is at to the others; who is behind is known on all of them."""

    def __init__(self, board: Noticeboard, rank_info: RankInfo, *, report: PhaseReport) -> None:
        self._board = board
        self._rank_info = rank_info
        self._report = report
        self._behind: tuple[int, RankPhase] | None = None

    @property
    def now(self) -> WorkerPhase:
        """The phase of the rank that is behind; that of this one if none is."""
        if self._behind is None or self._behind[0] == self._rank_info.rank:
            return self._report.now
        rank, phase = self._behind
        return replace(phase.phase, rank=f"rank {rank} of {self._rank_info.world}")

    async def run(self, thread: Callable[[], int]) -> None:
        """Exchange phases until cancelled, if there are other ranks; `thread` computes."""
        while self._rank_info.world > 1:
            await asyncio.to_thread(self.exchange, thread())
            await asyncio.sleep(EVERY_S)

    def exchange(self, thread: int) -> None:
        """Show what this rank is at, and look at the others; blocks, for a short time."""
        mine = RankPhase.of(self._report, in_collective=in_collective(thread))
        try:
            self._board.show(NOTICE, json.dumps(asdict(mine)))
            shown = self._board.shown(NOTICE)
        except UnavailableError as error:
            log.warning("phases of other ranks are not known", error=error)
            self._behind = None
            return
        ranks = {rank: RankPhase(**json.loads(text)) for rank, text in shown.items()}
        found = laggard(ranks)
        self._behind = None if found is None else (found, ranks[found])
