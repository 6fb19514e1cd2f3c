"""The worked numbers of the cost formulas, and their edges."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidError
from paceline.weights import cost
from paceline.weights.cost import Codec, Hop

LAN = {"num_bytes": 16e9, "bytes_per_s": 1.25e9, "start_s": 0.01}
WAN = {"num_bytes": 16e9, "bytes_per_s": 0.125e9, "start_s": 0.05}


@pytest.mark.parametrize(
    ("n", "unicast", "chain", "k", "tree"),
    [
        (8, 102.4, 14.76, 95, 27.66),
        (32, 409.6, 17.09, 199, 28.54),
        (128, 1638.4, 22.13, 403, 29.22),
    ],
)
def test_sixteen_gigabytes_at_ten_gigabit(
    n: int, unicast: float, chain: float, k: int, tree: float
) -> None:
    got = cost.unicast_s(n, num_bytes=16e9, bytes_per_s=1.25e9)
    assert got == pytest.approx(unicast)
    assert cost.best_chain_s(n, **LAN) == pytest.approx(chain, abs=0.005)
    assert round(cost.best_num_chunks(n, **LAN)) == k
    # the column of trees counts the start of each child
    depth, size = cost.tree_depth(n, 2), LAN | {"num_bytes": 32e9, "start_s": 0.02}
    best = cost.best_num_chunks(depth, **size)
    got = cost.tree_s(depth, best, fanout=2, **LAN | {"start_s": 0.02})
    assert got == pytest.approx(tree, abs=0.05)


def test_chain_and_binary_tree_are_equal_at_about_305() -> None:
    size = LAN | {"num_bytes": 32e9}
    tree = cost.best_chain_s(cost.tree_depth(305, 2), **size)
    assert cost.best_chain_s(305, **LAN) == pytest.approx(tree, rel=0.002)
    assert tree == pytest.approx(28.3, abs=0.05)


@pytest.mark.parametrize(("k", "seconds"), [(1, 102.48), (10, 21.93), (50, 15.162), (200, 15.318)])
def test_chains_of_eight(k: int, seconds: float) -> None:
    assert cost.chain_s(8, k, **LAN) == pytest.approx(seconds, abs=0.005)


def test_chain_over_a_wide_area() -> None:
    assert cost.unicast_s(16, num_bytes=16e9, bytes_per_s=0.125e9) == pytest.approx(2048)
    assert cost.best_chain_s(16, **WAN) == pytest.approx(148.35, abs=0.05)
    assert cost.chain_s(16, 196, **WAN) == pytest.approx(148.35, abs=0.05)
    assert cost.best_chain_s(1, **WAN) == pytest.approx(128, abs=0.1)


def test_relays_of_laminar() -> None:
    size = {"num_bytes": 16e9, "bytes_per_s": 1 / 0.8e-9, "start_s": 0.01}
    assert cost.best_num_chunks(9 - 1, **size) == pytest.approx(94.66, abs=0.01)
    assert cost.best_chain_s(9 - 1, **size) == pytest.approx(14.763, abs=0.001)


def test_gateway_and_two_levels_behind_it() -> None:
    hops = [Hop(0.125e9, 0.05), Hop(1.25e9 / 2, 0.001), Hop(1.25e9 / 2, 0.001)]
    assert cost.path_s(hops, chunk_bytes=16e6, num_chunks=63) == pytest.approx(8.167, abs=0.001)
    assert cost.unicast_s(7, num_bytes=1e9, bytes_per_s=0.125e9) == pytest.approx(56)


def test_a_path_of_equal_links_is_a_chain() -> None:
    hops = [Hop(1.25e9)] * 8
    chain = cost.chain_s(8, 50, **LAN | {"start_s": 0.0})
    assert cost.path_s(hops, chunk_bytes=16e9 / 50, num_chunks=50) == pytest.approx(chain)


def test_without_hops_nothing_takes_time() -> None:
    assert cost.path_s([], chunk_bytes=1, num_chunks=5) == 0


@pytest.mark.parametrize(
    ("n", "fanout", "depth"),
    [(0, 2, 0), (1, 2, 1), (2, 2, 1), (3, 2, 2), (6, 2, 2), (7, 2, 3), (5, 1, 5)],
)
def test_depth_of_a_tree(n: int, fanout: int, depth: int) -> None:
    assert cost.tree_depth(n, fanout) == depth


@pytest.mark.parametrize("field", ["start_s", "bytes_per_s"])
def test_no_best_number_without_costs(field: str) -> None:
    with pytest.raises(InvalidError, match=field):
        cost.best_num_chunks(4, **LAN | {field: 0.0})


@given(
    n=st.integers(1, 2000),
    num_bytes=st.integers(0, 10**12),
    rate=st.floats(1e4, 1e11),
    start=st.floats(1e-6, 1.0),
)
def test_chunks_stay_within_bounds(n: int, num_bytes: int, rate: float, start: float) -> None:
    size = cost.chunk_bytes(num_bytes, n, bytes_per_s=rate, start_s=start)
    assert cost.MIN_CHUNK_BYTES <= size <= cost.MAX_CHUNK_BYTES
    assert size % (64 << 10) == 0


@given(n=st.integers(2, 500), factor=st.floats(0.05, 20))
def test_no_number_of_chunks_beats_the_best(n: int, factor: float) -> None:
    best = cost.best_num_chunks(n, **LAN)
    assert cost.chain_s(n, best * factor, **LAN) >= cost.best_chain_s(n, **LAN) - 1e-9


def test_chunk_of_a_chain_is_the_best_one() -> None:
    size = cost.chunk_bytes(256 << 20, 7, bytes_per_s=25e6, start_s=1e-3)
    assert size == 1 << 20


@given(st.floats(1, 1e10), st.lists(st.floats(1, 1e10), min_size=1, max_size=9))
def test_shares_use_the_uplink_and_no_more(capacity: float, caps: list[float]) -> None:
    rates = cost.shares(capacity, caps)
    assert all(r <= cap for r, cap in zip(rates, caps, strict=True))
    assert math.isclose(sum(rates), min(capacity, sum(caps)), rel_tol=1e-6)


def test_shares_are_equal_where_the_uplink_is_narrow() -> None:
    assert cost.shares(10, [100, 100]) == [5, 5]
    assert cost.shares(10, [2, 100, 100]) == [2, 4, 4]
    assert cost.shares(10, []) == []


@pytest.mark.parametrize(
    ("rate", "ratio", "pays"),
    [(25e6, 0.1, True), (1.25e9, 0.1, False), (25e6, 1.01, False), (300e6, 0.5, True)],
)
def test_deltas_pay_over_slow_links(rate: float, ratio: float, pays: bool) -> None:
    assert cost.delta_pays(rate, Codec(ratio=ratio)) is pays
