"""A small world of places that do not exist, one sentence about each, and a search in it.

It is computed, so that no worker has to have a file, and the same everywhere.
"""

from __future__ import annotations

import re
import sqlite3
from dataclasses import dataclass
from functools import lru_cache

from paceline.platform.digest import Permutation, number

NUM_FACTS = 1000
MAX_QUERY_WORDS = 32
_WORD = re.compile(r"[A-Za-z0-9]+")
_FIRST = ("Ba", "Be", "Do", "Fa", "Ga", "Ho", "Ka", "Ko", "La", "Ma", "Mo", "Na", "Pe", "Ra", "So")
_MIDDLE = ("bi", "da", "lu", "mi", "no", "ra", "ri", "su", "ti", "ve")
_LAST = ("bor", "dan", "gel", "kas", "lin", "mur", "nos", "ral", "sen", "tok", "vas", "wen")
_MEASURES = (
    ("river", "long", "longer", "km", 900),
    ("mountain", "high", "higher", "m", 8000),
    ("bridge", "long", "longer", "m", 900),
    ("tower", "high", "higher", "m", 600),
)
NUM_KINDS = len(_MEASURES)


@dataclass(frozen=True, slots=True)
class Fact:
    """A place and its size."""

    name: str
    kind: str  # river, ...
    adjective: str  # long, ...
    comparative: str  # longer, ...
    unit: str
    size: int

    @property
    def place(self) -> str:
        """The place in a sentence."""
        return f"the {self.kind} {self.name}"

    @property
    def sentence(self) -> str:
        """The corpus's sentence about it."""
        return f"The {self.kind} {self.name} is {self.size} {self.unit} {self.adjective}."


def fact(index: int) -> Fact:
    """One of the `NUM_FACTS` facts; no two have the same name, and kinds take turns.

    Raises:
        IndexError: there are not so many.
    """
    if not 0 <= index < NUM_FACTS:
        raise IndexError(index)
    rest, first = divmod(_names()(index), len(_FIRST))
    last, middle = divmod(rest, len(_MIDDLE))
    chance = number("fact", index)
    kind, adjective, comparative, unit, most = _MEASURES[index % NUM_KINDS]
    size = 10 + chance % (most - 10)
    name = f"{_FIRST[first]}{_MIDDLE[middle]}{_LAST[last]}"
    return Fact(name, kind, adjective, comparative, unit, size)


@lru_cache(maxsize=1)
def _names() -> Permutation:
    return Permutation(len(_FIRST) * len(_MIDDLE) * len(_LAST), "names")


class Index:
    """Ranks all sentences by BM25, with SQLite's full-text index."""

    def __init__(self) -> None:
        # It is only read once it is filled, whichever thread a world is called from.
        self._rows = sqlite3.connect(":memory:", check_same_thread=False)
        self._rows.execute("CREATE VIRTUAL TABLE facts USING fts5(sentence)")
        sentences = [(fact(index).sentence,) for index in range(NUM_FACTS)]
        self._rows.executemany("INSERT INTO facts VALUES (?)", sentences)

    def best(self, query: str, most: int) -> list[str]:
        """The sentences that fit best, at most so many; none if no word occurs."""
        words = _WORD.findall(query)[:MAX_QUERY_WORDS]
        if not words:
            return []
        either = " OR ".join(f'"{word}"' for word in words)
        rows = self._rows.execute(
            "SELECT sentence FROM facts WHERE facts MATCH ? ORDER BY rank, rowid LIMIT ?",
            (either, most),
        )
        return [str(sentence) for (sentence,) in rows]


@lru_cache(maxsize=1)
def index() -> Index:
    """The index, built once in a process: a reset costs no more than a new set of notes."""
    return Index()
