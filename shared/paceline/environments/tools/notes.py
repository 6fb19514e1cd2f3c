"""Notes that last for an episode."""

from __future__ import annotations

from collections.abc import Mapping

MAX_NOTES = 64
MAX_CHARS = 1000


class Notes:
    """Texts by name."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = dict(texts)

    def write_note(self, name: str, text: str) -> str:
        """Keep a text under a name; an older one of that name is replaced."""
        if len(name) + len(text) > MAX_CHARS:
            raise ValueError(f"a note has at most {MAX_CHARS} characters")
        if len(self._texts) >= MAX_NOTES and name not in self._texts:
            raise ValueError(f"there are at most {MAX_NOTES} notes")
        self._texts[name] = text
        return "written"

    def read_note(self, name: str) -> str:
        """The text that is kept under a name."""
        if name not in self._texts:
            raise ValueError(f"no note of this name; there are: {', '.join(self._texts) or 'none'}")
        return self._texts[name]
