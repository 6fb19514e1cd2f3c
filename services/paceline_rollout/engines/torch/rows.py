"""State of running requests: one tensor per field, a row each, packed at the front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.interfaces import Generation
from paceline_rollout.engines.base import MAX_STOP_TOKENS
from paceline_rollout.engines.torch.cache import Group, Prefix
from paceline_rollout.engines.torch.sampling import OFF, Knobs, sample, uniforms

BUFFER = 64  # tokens a row can hold before it must be flushed


@dataclass(slots=True, eq=False)
class Running:
    """A request and what the engine has emitted for it."""

    request: Generation
    limit: int  # length at which its context is full or its max_tokens are used up
    known: tuple[int, ...]  # what must be prefilled: all of its tokens but the last
    prefix: Prefix | None = None  # what it reads of another's tokens
    emitted: list[int] = field(default_factory=list[int])
    recent: list[int] = field(default_factory=list[int])  # newest sampled tokens, for stop strings
    restricted: bool = False
    greedy: bool = False
    tempered: bool = False
    since: float = 0.0  # when it was submitted, when its prompt was begun, when it joined
    begun: float = 0.0
    joined: float = 0.0

    @property
    def base(self) -> int:
        """Tokens that are not in its own row."""
        return 0 if self.prefix is None else self.prefix.length

    @property
    def request_id(self) -> str:
        """Its name."""
        return self.request.request_id

    def again(self) -> None:
        """All of it must be prefilled, what it has emitted as well."""
        self.known = (*self.request.tokens, *self.emitted)[:-1]
        self.prefix = None


def running(request: Generation, max_context: int, *, since: float = 0.0) -> Running:
    """A request before its first token."""
    s = request.sampling
    return Running(
        request=request,
        limit=min(len(request.tokens) + s.max_tokens, max_context),
        recent=list(request.tokens[len(request.tokens) - request.sampled :]),
        known=request.tokens[:-1],
        restricted=s.top_k > 0 or s.top_p < 1 or s.min_p > 0,
        greedy=s.temperature == 0,
        tempered=s.temperature not in (0, 1),
        since=since,
    )


class Rows:
    """The running requests; `owners[i]` is the one in row i."""

    def __init__(self, *, most: int, device: torch.device) -> None:
        self.owners: list[Running] = []
        self._device = device
        self._stop_width = 0
        self._counts = dict.fromkeys(("restricted", "greedy", "tempered", "strings"), 0)
        self.token = self._long(most)
        self.length = self._long(most)
        self.base = self._long(most)  # tokens of its prefix, which are not in the row
        self.limit = self._long(most)
        self.fresh = self._long(most)  # tokens in the buffer
        self._seed = self._long(most)
        self._top_k = self._long(most)
        self._temperature = self._real(most)
        self._top_p = self._real(most)
        self._min_p = self._real(most)
        self._stops = self._long(most, MAX_STOP_TOKENS).fill_(-1)
        self._tokens = self._long(most, BUFFER)
        self._logprobs = self._real(most, BUFFER)
        self._fields = [value for value in vars(self).values() if isinstance(value, Tensor)]

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def with_strings(self) -> bool:
        """Whether any request has stop strings."""
        return self._counts["strings"] > 0

    def add(self, joining: Sequence[Running]) -> None:
        """Append requests."""
        first, last = len(self.owners), len(self.owners) + len(joining)
        knobs = [one.request.sampling for one in joining]
        self._fill(self.length, first, last, [len(one.known) + 1 for one in joining])
        self._fill(self.base, first, last, [one.base for one in joining])
        newest = [(one.emitted or one.request.tokens)[-1] for one in joining]
        self._fill(self.token, first, last, newest)
        self._fill(self.limit, first, last, [one.limit for one in joining])
        self._fill(self._seed, first, last, [s.seed for s in knobs])
        self._fill(self._top_k, first, last, [min(s.top_k, 1 << 40) or 1 << 40 for s in knobs])
        self._fill(self._temperature, first, last, [s.temperature for s in knobs])
        self._fill(self._top_p, first, last, [s.top_p if s.top_p < 1 else OFF for s in knobs])
        self._fill(self._min_p, first, last, [s.min_p for s in knobs])
        self.fresh[first:last] = 0
        self._add_stops(first, [s.stop_tokens for s in knobs])
        self.owners.extend(joining)
        self._count(joining, 1)

    def advance(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Sample a token for every row; which of them have stopped, and failed."""
        part = slice(0, len(self.owners))
        u = uniforms(self._seed[part], self.length[part])
        tokens, logprobs = sample(logits, self._knobs(part), u)
        places = torch.arange(len(self.owners), device=self._device) * BUFFER + self.fresh[part]
        self._tokens.view(-1).index_copy_(0, places, tokens)
        self._logprobs.view(-1).index_copy_(0, places, logprobs)
        self.token[part] = tokens
        self.length[part] += 1
        self.fresh[part] += 1
        stops = self._stops[part, : self._stop_width]
        return (tokens.unsqueeze(1) == stops).any(1), ~torch.isfinite(logprobs)

    def read(self, rows: Sequence[int] | slice) -> tuple[list[list[int]], list[list[float]]]:
        """What these rows have in their buffers, which are empty from then on."""
        picked = rows if isinstance(rows, slice) else torch.tensor(rows, device=self._device)
        counts: list[int] = self.fresh[picked].tolist()
        width = max(counts, default=0)
        tokens: list[list[int]] = self._tokens[picked, :width].tolist()
        logprobs: list[list[float]] = self._logprobs[picked, :width].tolist()
        self.fresh[picked] = 0
        if min(counts, default=0) == width:
            return tokens, logprobs
        return (
            [row[:n] for row, n in zip(tokens, counts, strict=True)],
            [row[:n] for row, n in zip(logprobs, counts, strict=True)],
        )

    def remove(self, rows: Sequence[int]) -> tuple[Tensor, Tensor] | None:
        """Drop rows; what was moved to fill the holes: (from, to), if anything."""
        gone = set(rows)
        self._count([self.owners[row] for row in gone], -1)
        left = len(self.owners) - len(gone)
        holes = sorted(row for row in gone if row < left)
        tails = [row for row in range(left, len(self.owners)) if row not in gone]
        for hole, tail in zip(holes, tails, strict=True):
            self.owners[hole] = self.owners[tail]
        del self.owners[left:]
        if not holes:
            return None
        sources = torch.tensor(tails, device=self._device)
        targets = torch.tensor(holes, device=self._device)
        for values in self._fields:
            values[targets] = values[sources]
        return sources, targets

    def groups(self) -> list[Group]:
        """The rows of each prefix that rows share."""
        found: dict[int, tuple[Prefix, list[int]]] = {}
        for row, one in enumerate(self.owners):
            if one.prefix is not None:
                found.setdefault(id(one.prefix), (one.prefix, []))[1].append(row)
        return [Group(self._picked(rows), prefix) for prefix, rows in found.values()]

    def clear(self) -> list[Running]:
        """Drop all rows."""
        found, self.owners = self.owners, []
        self._count(found, -1)
        return found

    def _picked(self, rows: list[int]) -> slice | Tensor:
        """Rows without a gap are cheaper to take."""
        if rows[-1] - rows[0] == len(rows) - 1:
            return slice(rows[0], rows[-1] + 1)
        return torch.tensor(rows, device=self._device)

    def _long(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self._device)

    def _real(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self._device)

    def _knobs(self, part: slice) -> Knobs:
        return Knobs(
            temperature=self._temperature[part],
            top_k=self._top_k[part],
            top_p=self._top_p[part],
            min_p=self._min_p[part],
            restricted=self._counts["restricted"] > 0,
            greedy=self._counts["greedy"] > 0,
            tempered=self._counts["tempered"] > 0,
        )

    def _count(self, some: Sequence[Running], sign: int) -> None:
        counts = self._counts
        counts["restricted"] += sign * sum(one.restricted for one in some)
        counts["greedy"] += sign * sum(one.greedy for one in some)
        counts["tempered"] += sign * sum(one.tempered for one in some)
        counts["strings"] += sign * sum(bool(one.request.sampling.stop_strings) for one in some)

    def _fill(self, values: Tensor, first: int, last: int, new: Sequence[float]) -> None:
        values[first:last] = torch.tensor(new, dtype=values.dtype, device=self._device)

    def _add_stops(self, first: int, stops: Sequence[tuple[int, ...]]) -> None:
        width = max(len(some) for some in stops)
        if not self.owners:
            self._stop_width = 0
        self._stop_width = max(self._stop_width, width)
        if not self._stop_width:
            return
        table = [[*some, *([-1] * (self._stop_width - len(some)))] for some in stops]
        last = first + len(stops)
        self._stops[first:last, : self._stop_width] = torch.tensor(table, device=self._device)
