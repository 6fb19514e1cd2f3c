from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline_rollout.engines.torch.admission import CacheMemory, TokenDemand, choose

DEMAND = st.tuples(st.integers(0, 4), st.integers(1, 40)).map(
    lambda pair: TokenDemand(pair[0], 10 * pair[0], pair[1])
)


@given(
    demands=st.lists(DEMAND, max_size=12),
    max_tokens=st.integers(1, 400),
    rows=st.integers(0, 6),
    columns=st.integers(1, 40),
    held=st.frozensets(st.integers(0, 4)),
    max_rows=st.integers(1, 8),
)
def test_as_many_are_admitted_as_fit(
    demands: list[TokenDemand],
    max_tokens: int,
    rows: int,
    columns: int,
    held: frozenset[int],
    max_rows: int,
):
    names = held if rows else frozenset[int]()
    before = CacheMemory(max_tokens, rows, columns if rows else 0, names, 10 * sum(names))

    def fits(count: int) -> bool:
        num = rows + count
        named = {demand.name for demand in demands[:count]}
        widest = max([before.columns, *(demand.own for demand in demands[:count])])
        blocks = 10 * sum(n for n in range(5) if n in names or n in named)
        return num <= max_rows and (num * widest + blocks <= max_tokens or num <= 1)

    chosen, after = choose(demands, before, max_rows=max_rows)
    assert not chosen or fits(chosen)
    assert chosen == len(demands) or not fits(chosen + 1)
    assert chosen or rows or not demands
    assert after.rows == rows + chosen
    assert after.blocks_in_use == names | {demand.name for demand in demands[:chosen]}
