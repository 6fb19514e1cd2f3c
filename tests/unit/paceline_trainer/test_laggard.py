"""The rank that the others wait for is named, not the one that reports."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from paceline.enums import Phase
from paceline.platform.server.phase_report import PhaseReport
from paceline.types import WorkerPhase
from paceline_trainer.ranks.distributed import Noticeboard
from paceline_trainer.ranks.laggard import RankPhase, RankPhases, laggard
from paceline_trainer.ranks.rank_info import RankInfo

STEP = (
    Phase.WAITING_FOR_BATCH,
    Phase.STEPPING,
    Phase.COMMITTING,
    Phase.CHECKPOINTING,
    Phase.PUBLISHING,
)
BEFORE = (Phase.DOWNLOADING_MODEL, Phase.LOADING_MODEL, Phase.LOADING_CHECKPOINT)
PLACES = [
    *((phase, -1) for phase in BEFORE[:2]),
    (Phase.LOADING_CHECKPOINT, 0),
    (Phase.PUBLISHING, 0),
    *((phase, step) for step in (1, 2) for phase in STEP),
    (Phase.FINISHED, -1),
]


def at(phase: Phase, number: int, marks: int = 0, *, in_collective: bool = True) -> RankPhase:
    return RankPhase(phase, number, 0.0, 0.0, 0.0, marks, in_collective)


@given(
    world=st.integers(2, 8),
    there=st.integers(1, len(PLACES) * 3 - 1),
    behind_by=st.integers(1, 4),
    data=st.data(),
)
def test_the_rank_that_is_behind_is_found(
    world: int, there: int, behind_by: int, data: st.DataObject
) -> None:
    """Wherever the others are: all pass the same places in the same order, three marks each."""
    late = data.draw(st.integers(0, world - 1))
    ranks: dict[int, RankPhase] = {}
    for rank in range(world):
        place = max(0, there - (behind_by if rank == late else 0))
        ranks[rank] = at(*PLACES[place // 3], place % 3)
    assert laggard(ranks) == late


@given(world=st.integers(2, 8), data=st.data())
def test_of_ranks_at_one_place_the_one_outside_of_a_collective_is_found(
    world: int, data: st.DataObject
) -> None:
    late = data.draw(st.integers(0, world - 1))
    ranks = {rank: at(Phase.STEPPING, 9, 4, in_collective=rank != late) for rank in range(world)}
    assert laggard(ranks) == late


@given(world=st.integers(0, 8), waits=st.booleans())
def test_nobody_is_named_where_all_are_alike(world: int, waits: bool) -> None:
    assert laggard(dict.fromkeys(range(world), at(Phase.STEPPING, 9, in_collective=waits))) is None


@pytest.fixture
def boards() -> Iterator[list[RankInfo]]:
    """Two ranks and their store, which ends with the object."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)  # pyright: ignore[reportPrivateImportUsage]
    yield [
        RankInfo(rank=rank, world=2, master_host="127.0.0.1", master_port=store.port)
        for rank in range(2)
    ]
    del store


def test_ranks_see_each_other_through_the_store_of_torchrun(boards: list[RankInfo]) -> None:
    reports = [PhaseReport(Phase.LOADING_MODEL) for _ in boards]
    ranks = [
        RankPhases(Noticeboard(info), info, report=report)
        for info, report in zip(boards, reports, strict=True)
    ]
    ranks[0].exchange(0)  # the other one has shown nothing yet
    assert ranks[0].now == WorkerPhase(Phase.LOADING_MODEL)
    for report in reports:
        report.enter(Phase.STEPPING, number=9)
        report.add()
    reports[0].mark()
    for each in (*ranks, ranks[0]):
        each.exchange(threading.get_ident())
    assert ranks[0].now == WorkerPhase(Phase.STEPPING, 9, 1.0, rank="rank 1 of 2")
    assert ranks[1].now == WorkerPhase(Phase.STEPPING, 9, 1.0)
    reports[1].mark()
    for each in (*ranks, ranks[0]):
        each.exchange(threading.get_ident())
    assert not ranks[0].now.rank
