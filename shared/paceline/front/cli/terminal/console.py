"""The console of tables and live views, which show texts that others have written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from paceline.platform.text import visible

_FILE_COLUMNS = 1000


class SafeConsole(Console):
    """A console that makes visible what could act on the terminal; its own colours still do.

    In a file or a pipe nothing is cut or left out for lack of room, unless `COLUMNS` sets a width.
    """

    def __init__(self, **options: Any) -> None:
        """Options are rich's."""
        super().__init__(**options)
        if not self.is_terminal and "width" not in options and not os.environ.get("COLUMNS"):
            self.width = _FILE_COLUMNS

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Make text visible as rich renders it; everything that is printed comes through here."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))
