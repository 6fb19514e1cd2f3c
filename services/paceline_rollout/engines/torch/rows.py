"""State of running requests: one tensor per field, one row per request, packed at the front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.plugins import MAX_STOP_TOKENS, EngineRequest
from paceline_rollout.engines.torch.cache import Prefix, PrefixGroup
from paceline_rollout.engines.torch.sampling import OFF, SamplingBatch, sample, uniforms

BUFFER = 64  # tokens that a row can hold until it must be flushed


@dataclass(slots=True, eq=False)
class Running:
    """A request and the tokens that the engine has emitted for it."""

    request: EngineRequest
    limit: int  # length at which its context is full or its max_tokens are used up
    prompt: tuple[int, ...]  # tokens to prefill: all but the last
    prefix: Prefix | None = None  # the shared prefix that it reads
    emitted: list[int] = field(default_factory=list[int])
    recent: list[int] = field(default_factory=list[int])  # newest sampled tokens, for stop strings
    restricted: bool = False
    greedy: bool = False
    tempered: bool = False
    submitted_at: float = 0.0  # in seconds of the clock, as the two below
    prefill_at: float = 0.0
    decode_at: float = 0.0

    @property
    def base(self) -> int:
        """Tokens that are in the shared prefix and not in its own row."""
        return 0 if self.prefix is None else self.prefix.length

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self.request.request_id

    def restart(self) -> None:
        """Require a new prefill, including the tokens emitted so far."""
        self.prompt = (*self.request.tokens, *self.emitted)[:-1]
        self.prefix = None


def running(request: EngineRequest, max_context: int, *, submitted_at: float = 0.0) -> Running:
    """The state of a request before its first token."""
    s = request.sampling
    return Running(
        request=request,
        limit=min(len(request.tokens) + s.max_tokens, max_context),
        recent=list(request.tokens[len(request.tokens) - request.sampled :]),
        prompt=request.tokens[:-1],
        restricted=s.top_k > 0 or s.top_p < 1 or s.min_p > 0,
        greedy=s.temperature == 0,
        tempered=s.temperature not in (0, 1),
        submitted_at=submitted_at,
    )


class Rows:
    """The running requests; `owners[i]` has row i."""

    def __init__(self, *, max_rows: int, device: torch.device) -> None:
        self.owners: list[Running] = []
        self._device = device
        self._stop_width = 0
        self._counts = dict.fromkeys(("restricted", "greedy", "tempered", "strings"), 0)
        self.token = self._long(max_rows)
        self.length = self._long(max_rows)
        self.base = self._long(max_rows)  # tokens of the shared prefix, which are not in the row
        self.limit = self._long(max_rows)
        self.fresh = self._long(max_rows)  # tokens in the buffer
        self._seed = self._long(max_rows)
        self._top_k = self._long(max_rows)
        self._temperature = self._real(max_rows)
        self._top_p = self._real(max_rows)
        self._min_p = self._real(max_rows)
        self._stops = self._long(max_rows, MAX_STOP_TOKENS).fill_(-1)
        self._tokens = self._long(max_rows, BUFFER)
        self._logprobs = self._real(max_rows, BUFFER)
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
        sampling = [owner.request.sampling for owner in joining]
        self._fill(self.length, first, last, [len(owner.prompt) + 1 for owner in joining])
        self._fill(self.base, first, last, [owner.base for owner in joining])
        newest = [(owner.emitted or owner.request.tokens)[-1] for owner in joining]
        self._fill(self.token, first, last, newest)
        self._fill(self.limit, first, last, [owner.limit for owner in joining])
        self._fill(self._seed, first, last, [s.seed for s in sampling])
        self._fill(self._top_k, first, last, [min(s.top_k, 1 << 40) or 1 << 40 for s in sampling])
        self._fill(self._temperature, first, last, [s.temperature for s in sampling])
        self._fill(self._top_p, first, last, [s.top_p if s.top_p < 1 else OFF for s in sampling])
        self._fill(self._min_p, first, last, [s.min_p for s in sampling])
        self.fresh[first:last] = 0
        self._add_stops(first, [s.stop_tokens for s in sampling])
        self.owners.extend(joining)
        self._count(joining, 1)

    def advance(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Sample a token for every row; returns which rows have stopped, and which have failed."""
        part = slice(0, len(self.owners))
        u = uniforms(self._seed[part], self.length[part])
        tokens, logprobs = sample(logits, self._sampling(part), u)
        slots = torch.arange(len(self.owners), device=self._device) * BUFFER + self.fresh[part]
        self._tokens.view(-1).index_copy_(0, slots, tokens)
        self._logprobs.view(-1).index_copy_(0, slots, logprobs)
        self.token[part] = tokens
        self.length[part] += 1
        self.fresh[part] += 1
        stops = self._stops[part, : self._stop_width]
        return (tokens.unsqueeze(1) == stops).any(1), ~torch.isfinite(logprobs)

    def read(self, rows: Sequence[int] | slice) -> tuple[list[list[int]], list[list[float]]]:
        """Take tokens and log-probs from the buffers of rows."""
        selected = rows if isinstance(rows, slice) else torch.tensor(rows, device=self._device)
        counts: list[int] = self.fresh[selected].tolist()
        width = max(counts, default=0)
        tokens: list[list[int]] = self._tokens[selected, :width].tolist()
        logprobs: list[list[float]] = self._logprobs[selected, :width].tolist()
        self.fresh[selected] = 0
        if min(counts, default=0) == width:
            return tokens, logprobs
        return (
            [row[:n] for row, n in zip(tokens, counts, strict=True)],
            [row[:n] for row, n in zip(logprobs, counts, strict=True)],
        )

    def remove(self, rows: Sequence[int]) -> tuple[Tensor, Tensor] | None:
        """Remove rows; returns which were moved to fill the holes, as (from, to), if any were."""
        removed = set(rows)
        self._count([self.owners[row] for row in removed], -1)
        remaining = len(self.owners) - len(removed)
        holes = sorted(row for row in removed if row < remaining)
        tails = [row for row in range(remaining, len(self.owners)) if row not in removed]
        for hole, tail in zip(holes, tails, strict=True):
            self.owners[hole] = self.owners[tail]
        del self.owners[remaining:]
        if not holes:
            return None
        sources = torch.tensor(tails, device=self._device)
        targets = torch.tensor(holes, device=self._device)
        for values in self._fields:
            values[targets] = values[sources]
        return sources, targets

    def groups(self) -> list[PrefixGroup]:
        """The shared prefixes, each with its rows."""
        found: dict[int, tuple[Prefix, list[int]]] = {}
        for row, owner in enumerate(self.owners):
            if owner.prefix is not None:
                found.setdefault(id(owner.prefix), (owner.prefix, []))[1].append(row)
        return [PrefixGroup(self._select(rows), prefix) for prefix, rows in found.values()]

    def clear(self) -> list[Running]:
        """Remove and return all requests."""
        found, self.owners = self.owners, []
        self._count(found, -1)
        return found

    def _select(self, rows: list[int]) -> slice | Tensor:
        """An index of rows: a slice if they are contiguous, which is cheaper."""
        if rows[-1] - rows[0] == len(rows) - 1:
            return slice(rows[0], rows[-1] + 1)
        return torch.tensor(rows, device=self._device)

    def _long(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self._device)

    def _real(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self._device)

    def _sampling(self, part: slice) -> SamplingBatch:
        return SamplingBatch(
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
        counts["restricted"] += sign * sum(owner.restricted for owner in some)
        counts["greedy"] += sign * sum(owner.greedy for owner in some)
        counts["tempered"] += sign * sum(owner.tempered for owner in some)
        counts["strings"] += sign * sum(bool(owner.request.sampling.stop_strings) for owner in some)

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
