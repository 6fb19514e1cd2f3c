"""The console of tables and live views, which show texts that others have written."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from paceline.text import visible


class SafeConsole(Console):
    """A console that makes visible what could act on the terminal; its own colours still do."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """As rich has it; everything that is printed comes through here."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))
