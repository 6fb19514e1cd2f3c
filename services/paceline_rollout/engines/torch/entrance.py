"""How requests join: memory for them, prefill a piece at a time, a row."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import islice

from paceline_rollout.engines.torch.admission import Memory, Want, choose
from paceline_rollout.engines.torch.cache import Block, SlotCache
from paceline_rollout.engines.torch.model import Policy
from paceline_rollout.engines.torch.prefixes import PADDING, Prefill, Prefixes
from paceline_rollout.engines.torch.rows import Rows, Running

CACHED_SHARE = 4  # of the memory, one in so many is for prefixes that nobody reads


class Entrance:
    """Takes requests from a line into rows.

    A long prompt stays where it was computed, and all who have it read it there; a short one is
    copied into the rows, where all can be attended to at once. Nothing but keys and values of
    the last token is missing then, which the next decode step computes.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        rows: Rows,
        cache: SlotCache,
        max_concurrent: int,
        prefill_tokens: int,
        most: int,
        least_shared: int,
    ) -> None:
        self._rows = rows
        self._cache = cache
        self._max_concurrent = max_concurrent
        self._most = most
        self._least_shared = least_shared
        self._prefixes = Prefixes()
        self._prefill = Prefill(
            policy, self._prefixes, most=prefill_tokens, least_shared=least_shared
        )
        self._joined = 0

    @property
    def tokens_done(self) -> int:
        """Prompt tokens computed."""
        return self._prefill.tokens_done + self._joined

    @property
    def tokens_adopted(self) -> int:
        """Prompt tokens found among the prefixes."""
        return self._prefill.tokens_adopted

    @property
    def memory(self) -> int:
        """Tokens for which there is memory at this moment."""
        store = self._cache.rows * self._cache.columns
        return store + self._prefixes.size + self._prefill.size + self._orphaned()

    def admit(self, startable: Iterable[Running], clock: Callable[[], float]) -> list[Running]:
        """One round of prefill; those of the first in line that have joined."""
        free = self._max_concurrent - len(self._rows)
        first = list(islice(startable, max(free, 0)))
        wants = [self._want(one) for one in first]
        if first:
            chosen, memory = choose(wants, self._taken(), most_rows=self._max_concurrent)
            first, wants = first[:chosen], wants[:chosen]
            self._make_room(memory, wants)
        if first:
            now = clock()
            for one in first:
                one.begun = one.begun or now
        named = {self._name(one): one.known for one in first if one.known}
        self._prefill.run({n: known for n, known in named.items() if self._prefixes.get(n) is None})
        joined = self._join(first)
        if joined:
            now = clock()
            for one in joined:
                one.joined = one.joined or now
        return joined

    def forget(self) -> None:
        """No new request may use what was computed up to now."""
        self._prefill.clear()
        self._prefixes.clear()

    def clear(self) -> None:
        """Let go of all memory; no row is in use."""
        self.forget()
        self._cache.clear()

    def _join(self, first: list[Running]) -> list[Running]:
        """Put those into rows whose prefill is done."""
        copied: dict[int, tuple[Block, list[int]]] = {}
        order: dict[int, list[Running]] = {}
        for one in first:
            prefix = self._prefixes.get(self._name(one)) if one.known else None
            if one.known and prefix is None:
                continue
            place = 0
            if prefix is not None and self._refers(one):
                one.prefix = prefix
            elif prefix is not None:
                place = id(prefix.block)
                copied.setdefault(place, (prefix.block, []))[1].append(prefix.row)
            order.setdefault(place, []).append(one)
        at, joined = len(self._rows), list[Running]()
        for place, ones in order.items():
            if place in copied:
                self._cache.insert(*copied[place], at + len(joined))
            joined += ones
        if joined:
            self._rows.add(joined)
            self._joined += len(joined)
        if not self._least_shared:
            self._prefixes.clear()
        return joined

    def _make_room(self, memory: Memory, wants: list[Want]) -> None:
        """Let go of prefixes that nobody needs, and give the rows their size."""
        needed = {want.name: want.prefix for want in wants}
        new = sum(size for name, size in needed.items() if name not in self._prefixes)
        used = [(id(block), block.size) for block in self._read()]
        keep = {name: size for name, size in (*used, *needed.items()) if name in self._prefixes}
        spare = memory.most - new - self._orphaned()
        unused = sum(keep.values()) + memory.most // CACHED_SHARE
        self._prefixes.trim(min(spare - memory.rows * memory.columns, unused), keep)
        self._resize(memory, spare - self._prefixes.size)

    def _resize(self, memory: Memory, most: int) -> None:
        rows, columns = self._cache.rows, self._cache.columns
        enough = rows >= memory.rows and columns >= memory.columns
        if enough and rows * columns <= most:
            return
        generous = min(max(1 << (memory.rows - 1).bit_length(), 8), self._max_concurrent)
        sizes = ((generous, max(columns, memory.columns)), (generous, memory.columns))
        fitting = (size for size in sizes if size[0] * size[1] <= most)
        self._cache.resize(*next(fitting, (memory.rows, memory.columns)), used=len(self._rows))

    def _taken(self) -> Memory:
        read = self._read()
        return Memory(
            most=self._most,
            rows=len(self._rows),
            columns=max((self._columns(one) for one in self._rows.owners), default=0),
            held=frozenset(id(block) for block in read),
            blocks=sum(block.size for block in read),
        )

    def _want(self, one: Running) -> Want:
        found = self._prefixes.get(self._name(one))
        if found is not None:
            return Want(id(found.block), found.block.size, self._columns(one))
        num = len(one.known)
        # Short ones are computed together: as much as padding may add.
        padded = num if self._refers(one) or not num else num + num // 4 + PADDING
        return Want(self._name(one), padded, self._columns(one))

    def _columns(self, one: Running) -> int:
        own = one.limit - (len(one.known) if self._refers(one) else 0)
        return -(-own // 16) * 16

    def _name(self, one: Running) -> Hashable:
        return one.known if self._least_shared else one.request_id

    def _refers(self, one: Running) -> bool:
        return 0 < self._least_shared <= len(one.known)

    def _read(self) -> list[Block]:
        """Blocks that running rows read."""
        prefixes = (one.prefix for one in self._rows.owners)
        return list({id(p.block): p.block for p in prefixes if p is not None}.values())

    def _orphaned(self) -> int:
        return sum(block.size for block in self._read() if id(block) not in self._prefixes)
