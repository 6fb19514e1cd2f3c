"""Admits requests to decoding: reserves memory, prefills in chunks, assigns rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import islice

from paceline_rollout.engines.torch.admission import CacheMemory, TokenDemand, choose
from paceline_rollout.engines.torch.cache import Block, SlotCache
from paceline_rollout.engines.torch.model import TorchModel
from paceline_rollout.engines.torch.prefixes import PADDING, Prefill, Prefixes
from paceline_rollout.engines.torch.rows import Rows, Running

CACHED_SHARE = 4  # 1/4 of the memory may hold prefixes that no request reads


class PrefillScheduler:
    """Moves requests from a queue into rows.

    A long prompt stays where it was computed, and all its requests read it there; a short one is
    copied into their rows, so that one attention call covers them all. Only the keys and values
    of the last token are still missing then; the next decode step computes them.
    """

    def __init__(
        self,
        *,
        policy: TorchModel,
        rows: Rows,
        cache: SlotCache,
        max_concurrent: int,
        prefill_tokens: int,
        max_tokens: int,
        least_shared: int,
    ) -> None:
        self._rows = rows
        self._cache = cache
        self._max_concurrent = max_concurrent
        self._max_tokens = max_tokens
        self._least_shared = least_shared
        self._shares_prefixes = policy.shares_prefixes
        self._prefixes = Prefixes()
        self._prefill = Prefill(
            policy, self._prefixes, max_tokens=prefill_tokens, least_shared=least_shared
        )
        self._num_admitted = 0

    @property
    def tokens_done(self) -> int:
        """Prompt tokens computed."""
        return self._prefill.tokens_done + self._num_admitted

    @property
    def tokens_adopted(self) -> int:
        """Prompt tokens copied from cached prefixes."""
        return self._prefill.tokens_adopted

    @property
    def memory(self) -> int:
        """Tokens for which memory is allocated."""
        store = self._cache.rows * self._cache.columns
        return store + self._prefixes.size + self._prefill.size + self._orphaned()

    def admit(self, startable: Iterable[Running], clock: Callable[[], float]) -> list[Running]:
        """Do one round of prefill; returns the requests that were admitted."""
        free = self._max_concurrent - len(self._rows)
        first = list(islice(startable, max(free, 0)))
        demands = [self._demand(entry) for entry in first]
        if first:
            chosen, memory = choose(demands, self._memory_in_use(), max_rows=self._max_concurrent)
            first, demands = first[:chosen], demands[:chosen]
            self._reserve(memory, demands)
        if first:
            now = clock()
            for entry in first:
                entry.prefill_at = entry.prefill_at or now
        named = {self._name(entry): entry.prompt for entry in first if entry.prompt}
        self._prefill.run(
            {n: prompt for n, prompt in named.items() if self._prefixes.get(n) is None}
        )
        admitted = self._admit_prefilled(first)
        if admitted:
            now = clock()
            for entry in admitted:
                entry.decode_at = entry.decode_at or now
        return admitted

    def forget(self) -> None:
        """Drop all cached prefixes, so that no new request reads them."""
        self._prefill.clear()
        self._prefixes.clear()

    def clear(self) -> None:
        """Free all memory; no row may be in use."""
        self.forget()
        self._cache.clear()

    def _admit_prefilled(self, first: list[Running]) -> list[Running]:
        """Assign rows to the requests whose prefill is done."""
        copied: dict[int, tuple[Block, list[int]]] = {}
        order: dict[int, list[Running]] = {}
        for entry in first:
            prefix = self._prefixes.get(self._name(entry)) if entry.prompt else None
            if entry.prompt and prefix is None:
                continue
            source = 0
            if prefix is not None and self._shares_prefix(entry):
                entry.prefix = prefix
            elif prefix is not None:
                source = id(prefix.block)
                copied.setdefault(source, (prefix.block, []))[1].append(prefix.row)
            order.setdefault(source, []).append(entry)
        first_row, admitted = len(self._rows), list[Running]()
        for source, entries in order.items():
            if source in copied:
                self._cache.insert(*copied[source], first_row + len(admitted))
            admitted += entries
        if admitted:
            self._rows.add(admitted)
            self._num_admitted += len(admitted)
        if not self._least_shared:
            self._prefixes.clear()
        return admitted

    def _reserve(self, memory: CacheMemory, demands: list[TokenDemand]) -> None:
        """Evict prefixes that are not needed, and resize the rows."""
        needed = {demand.name: demand.prefix for demand in demands}
        new = sum(size for name, size in needed.items() if name not in self._prefixes)
        used = [(id(block), block.size) for block in self._blocks_in_use()]
        keep = {name: size for name, size in (*used, *needed.items()) if name in self._prefixes}
        available = memory.max_tokens - new - self._orphaned()
        unused = sum(keep.values()) + memory.max_tokens // CACHED_SHARE
        self._prefixes.trim(min(available - memory.rows * memory.columns, unused), keep)
        self._resize(memory, available - self._prefixes.size)

    def _resize(self, memory: CacheMemory, max_tokens: int) -> None:
        rows, columns = self._cache.rows, self._cache.columns
        large_enough = rows >= memory.rows and columns >= memory.columns
        if large_enough and rows * columns <= max_tokens:
            return
        num_rows = min(max(1 << (memory.rows - 1).bit_length(), 8), self._max_concurrent)
        sizes = ((num_rows, max(columns, memory.columns)), (num_rows, memory.columns))
        fitting = (size for size in sizes if size[0] * size[1] <= max_tokens)
        self._cache.resize(*next(fitting, (memory.rows, memory.columns)), used=len(self._rows))

    def _memory_in_use(self) -> CacheMemory:
        in_use = self._blocks_in_use()
        return CacheMemory(
            max_tokens=self._max_tokens,
            rows=len(self._rows),
            columns=max((self._columns(entry) for entry in self._rows.owners), default=0),
            blocks_in_use=frozenset(id(block) for block in in_use),
            block_tokens=sum(block.size for block in in_use),
        )

    def _demand(self, entry: Running) -> TokenDemand:
        found = self._prefixes.get(self._name(entry))
        if found is not None:
            return TokenDemand(id(found.block), found.block.size, self._columns(entry))
        num = len(entry.prompt)
        # Short prompts are computed together: add as much as padding may.
        padded = num if self._shares_prefix(entry) or not num else num + num // 4 + PADDING
        return TokenDemand(self._name(entry), padded, self._columns(entry))

    def _columns(self, entry: Running) -> int:
        own = entry.limit - (len(entry.prompt) if self._shares_prefix(entry) else 0)
        return -(-own // 16) * 16

    def _name(self, entry: Running) -> Hashable:
        return entry.prompt if self._least_shared else entry.request_id

    def _shares_prefix(self, entry: Running) -> bool:
        return self._shares_prefixes and 0 < self._least_shared <= len(entry.prompt)

    def _blocks_in_use(self) -> list[Block]:
        """Blocks that running requests read."""
        prefixes = (entry.prefix for entry in self._rows.owners)
        return list({id(p.block): p.block for p in prefixes if p is not None}.values())

    def _orphaned(self) -> int:
        return sum(block.size for block in self._blocks_in_use() if id(block) not in self._prefixes)
