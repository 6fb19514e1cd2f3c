"""Threads of processes that compute on a CPU."""

from pathlib import Path

import pytest

from paceline.platform.server.cores import available_cores, threads_for


@pytest.mark.parametrize(
    ("limit", "expected"), [("max 100000", 64), ("150000 100000", 2), ("50000 100000", 1), ("", 64)]
)
def test_the_limit_of_a_container_counts(limit: str, expected: int, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(limit)
    assert available_cores(limit=tmp_path / "cpu.max", affinity=64) == expected


@pytest.mark.parametrize(
    ("wanted", "hidden", "processes", "expected"),
    [
        *[(3, 64, 1, 3), ("auto", 128, 1, 1), ("auto", 0, 1, 1)],
        *[("auto", 576, 1, 8), ("auto", 576, 2, 4), ("auto", 4096, 16, 1)],
    ],
)
def test_threads(wanted: int, hidden: int, processes: int, expected: int) -> None:
    assert threads_for(wanted, hidden=hidden, processes=processes, cores=8) == expected
