"""Documents as HTML tables and data frames, for notebooks.

What a model or a user wrote is escaped, and its control characters are made visible.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.errors.extras import not_installed
from paceline.platform.text import visible

if TYPE_CHECKING:
    import pandas as pd

_MOST_ROWS = 50
_MOST_CHARS = 120


class Tabular:
    """A document that is a list of rows."""

    def records(self) -> list[dict[str, Any]]:
        """One flat mapping per row."""
        raise NotImplementedError

    def to_pandas(self) -> pd.DataFrame:
        """One line per row.

        Raises:
            ModuleNotFoundError: pandas is not installed; the message says what installs it.
        """
        try:
            import pandas as pd
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(not_installed(error), name=error.name) from None
        return pd.DataFrame.from_records(self.records())

    def _repr_html_(self) -> str:
        return table_html(self.records())


def table_html(records: Sequence[Mapping[str, Any]]) -> str:
    """The last 50 rows as an HTML table."""
    if not records:
        return "<p>no rows</p>"
    names = list(dict.fromkeys(name for record in records for name in record))
    shown = records[-_MOST_ROWS:]
    head = "".join(f"<th>{_escaped(name)}</th>" for name in names)
    body = "".join(f"<tr>{_cells(record, names)}</tr>" for record in shown)
    left = len(records) - len(shown)
    note = f"<p>the last {len(shown)} of {len(records)} rows</p>" if left else ""
    return f"{note}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def facts_html(title: str, facts: Iterable[tuple[str, Any]]) -> str:
    """A title, and facts by name; those that are not known are left out."""
    rows = "".join(
        f"<tr><th>{_escaped(name)}</th><td>{_cell(value)}</td></tr>"
        for name, value in facts
        if value not in (None, "")
    )
    return f"<h4>{_escaped(title)}</h4><table>{rows}</table>"


def flattened(values: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as `outer.inner`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, prefix=f"{prefix}{name}.")  # pyright: ignore[reportUnknownArgumentType]
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _cells(record: Mapping[str, Any], names: Sequence[str]) -> str:
    return "".join(f"<td>{_cell(record.get(name))}</td>" for name in names)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    text = str(value)
    return _escaped(text if len(text) <= _MOST_CHARS else text[: _MOST_CHARS - 1] + "…")


def _escaped(text: str) -> str:
    return html.escape(visible(text))
