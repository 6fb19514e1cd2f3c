"""The prefix tree of some sequences, in which each distinct prefix occurs once.

Sequences that begin alike (samples of one prompt, branches of one episode) share a path from the
root. The tree is laid out as one row of tokens; a token attends to the tokens on its own path.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from paceline_trainer.columns import Ints


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `start` to `end` that the sequences `first` to `last`, exclusive, have in common."""

    first: int
    last: int
    start: int
    end: int

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Segments in the order in which their tokens lie in the row."""

    segments: tuple[Segment, ...]
    places: Ints  # [sequences, length]: where in the row each token lies; 0 beyond a sequence
    num_tokens: int  # length of the row


def prefix_order(tokens: Ints, starts: Ints, used: Ints) -> tuple[Ints, Ints]:
    """An order in which sequences with a long common prefix are neighbours.

    Args:
        tokens: all tokens, one sequence after the other.
        starts: [n] where each sequence begins.
        used: [n] how many of its tokens count.

    Returns:
        The order [n], and for each place in it the number of tokens that this sequence and the one
        before it begin with in common; 0 for the first.
    """
    words = [_word(tokens[start : start + size]) for start, size in _pairs(starts, used)]
    order = np.array(sorted(range(len(words)), key=words.__getitem__), np.int64)
    common = np.zeros(len(order), np.int64)
    for place in range(1, len(order)):
        one, two = order[place - 1], order[place]
        size = int(min(used[one], used[two]))
        first = tokens[starts[one] : starts[one] + size]
        second = tokens[starts[two] : starts[two] + size]
        different = np.flatnonzero(first != second)
        common[place] = different[0] if len(different) else size
    return order, common


def prefix_tree(used: Ints, common: Ints, *, least: int = 1) -> PrefixTree:
    """The tree of sequences that are in prefix order.

    Args:
        used: [n] their lengths.
        common: [n] see `prefix_order`; the first is ignored.
        least: tokens that a segment of several sequences has; where fewer are shared, each sequence
            has its own.
    """
    found = _segments(used, common, least)
    segments = sorted(found, key=lambda each: (each.start, -each.end, each.first))
    places = np.zeros((len(used), int(used.max(initial=0))), np.int64)
    offset = 0
    for each in segments:
        own = np.arange(offset, offset + each.size)
        places[each.first : each.last, each.start : each.end] = own
        offset += each.size
    return PrefixTree(tuple(segments), places, offset)


def _segments(used: Ints, common: Ints, least: int) -> Iterator[Segment]:
    """Segments of a tree, in no order; fewer than twice as many as there are sequences."""
    open_ = [(0, len(used), 0)] if len(used) else []
    while open_:
        first, last, depth = open_.pop()
        if last - first == 1:
            if used[first] > depth:
                yield Segment(first, last, depth, int(used[first]))
            continue
        inner = common[first + 1 : last]
        end = int(inner.min())
        cuts = [first, *(first + 1 + np.flatnonzero(inner == end)).tolist(), last]
        if end - depth >= least:
            yield Segment(first, last, depth, end)
            depth = end
        open_.extend((a, b, depth) for a, b in itertools.pairwise(cuts))


def ranges(starts: Ints, counts: Ints) -> Ints:
    """Concatenated ranges: `count` numbers from each `start`."""
    shift = starts - (np.cumsum(counts) - counts)
    return np.repeat(shift, counts) + np.arange(int(counts.sum()))


def _pairs(starts: Ints, used: Ints) -> Iterator[tuple[int, int]]:
    return zip(starts.tolist(), used.tolist(), strict=True)


def _word(tokens: Ints) -> bytes:
    """Bytes that are ordered as the tokens are."""
    return tokens.astype(">u4").tobytes()
