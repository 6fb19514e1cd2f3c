"""Tables that keep what matters on a narrow terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

_GAP = 2
_LEAST_TEXT = 16  # columns of a terminal that a long text needs to be of use


@dataclass(frozen=True, slots=True)
class Column:
    """A column; those of the highest `rank` leave a narrow terminal first, those of 0 never."""

    name: str
    rank: int = 0
    is_long: bool = False  # a text that wraps, or with `is_cut` ends in an ellipsis
    is_cut: bool = False


class FittingTable:
    """A table whose cells are whole: columns that do not fit are left out and named below it.

    Cells are plain text, without markup.
    """

    def __init__(self, *columns: Column | str) -> None:
        self._columns = [
            column if isinstance(column, Column) else Column(column) for column in columns
        ]
        self._rows: list[tuple[list[Text], str]] = []

    def add_row(self, *cells: str | Text, style: str = "") -> None:
        """Add a row, with a cell for each column or for the first ones."""
        missing = [""] * (len(self._columns) - len(cells))
        row = [Text(cell) if isinstance(cell, str) else cell for cell in (*cells, *missing)]
        self._rows.append((row, style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render as many columns as fit."""
        shown = self._fitting(options.max_width)
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
        for number, width in self._widths(shown, options.max_width).items():
            column = self._columns[number]
            overflow = "ellipsis" if column.is_cut else "fold"
            table.add_column(column.name, width=width, no_wrap=column.is_cut, overflow=overflow)
        for cells, style in self._rows:
            table.add_row(*(cells[number] for number in shown), style=style)
        yield table
        hidden = [
            unseen.name for n, unseen in enumerate(self._columns) if n not in shown and unseen.name
        ]
        if hidden:
            yield Text(f"not shown in {options.max_width} columns: {', '.join(hidden)}", "dim")

    def _fitting(self, width: int) -> Sequence[int]:
        """Numbers of the columns that fit."""
        shown = list(range(len(self._columns)))
        while sum(self._least(number) + _GAP for number in shown) - _GAP > width:
            last = max(shown, key=lambda number: self._columns[number].rank)
            if self._columns[last].rank == 0:
                break
            shown.remove(last)
        return shown

    def _widths(self, shown: Sequence[int], width: int) -> dict[int, int]:
        """The width of each column: long texts share what others leave, the widest give way."""
        widths = {number: self._least(number) for number in shown}
        left = width - sum(used + _GAP for used in widths.values()) + _GAP
        while left < 0 and max(widths.values()) > _LEAST_TEXT:
            widths[max(widths, key=widths.__getitem__)] -= 1
            left += 1
        for number in shown:
            more = min(max(left, 0), self._most(number) - widths[number])
            widths[number] += more
            left -= more
        return widths

    def _least(self, number: int) -> int:
        """The width that a column needs."""
        most = self._most(number)
        return min(most, _LEAST_TEXT) if self._columns[number].is_long else most

    def _most(self, number: int) -> int:
        """The width of its longest cell."""
        texts = [Text(self._columns[number].name), *(cells[number] for cells, _ in self._rows)]
        return max(cell.cell_len for cell in texts)
