from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline_rollout.engines.torch.admission import Memory, Want, choose

WANT = st.tuples(st.integers(0, 4), st.integers(1, 40)).map(
    lambda pair: Want(pair[0], 10 * pair[0], pair[1])
)


@given(
    wants=st.lists(WANT, max_size=12),
    most=st.integers(1, 400),
    rows=st.integers(0, 6),
    columns=st.integers(1, 40),
    held=st.frozensets(st.integers(0, 4)),
    most_rows=st.integers(1, 8),
)
def test_as_many_join_as_fit_and_no_more(
    wants: list[Want], most: int, rows: int, columns: int, held: frozenset[int], most_rows: int
):
    names = held if rows else frozenset[int]()
    before = Memory(most, rows, columns if rows else 0, names, 10 * sum(names))

    def fits(count: int) -> bool:
        num = rows + count
        named = {one.name for one in wants[:count]}
        wide = max([before.columns, *(one.own for one in wants[:count])])
        blocks = 10 * sum(n for n in range(5) if n in names or n in named)
        return num <= most_rows and (num * wide + blocks <= most or num <= 1)

    chosen, after = choose(wants, before, most_rows=most_rows)
    assert not chosen or fits(chosen)
    assert chosen == len(wants) or not fits(chosen + 1)
    assert chosen or rows or not wants
    assert after.rows == rows + chosen
    assert after.held == names | {one.name for one in wants[:chosen]}
