"""Cached prefixes for later requests, and chunked prefill."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field

from paceline_rollout.engines.torch.cache import Block, Prefix
from paceline_rollout.engines.torch.model import TorchModel

PADDING = 32  # tokens by which the lengths in one forward pass may always differ
Tokens = tuple[int, ...]


@dataclass(slots=True)
class _CachedBlock:
    block: Block
    names: list[Hashable] = field(default_factory=list[Hashable])


class Prefixes:
    """Prefixes by name; blocks are evicted in LRU order."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Prefix] = {}
        self._blocks: OrderedDict[int, _CachedBlock] = OrderedDict()
        self._lengths: Counter[int] = Counter()
        self.size = 0  # tokens

    def add(self, name: Hashable, prefix: Prefix) -> None:
        """Cache a prefix."""
        cached = self._blocks.get(id(prefix.block))
        if cached is None:
            cached = self._blocks[id(prefix.block)] = _CachedBlock(prefix.block)
            self.size += prefix.block.size
        cached.names.append(name)
        self._found[name] = prefix
        self._lengths[prefix.length] += 1

    def get(self, name: Hashable) -> Prefix | None:
        """The prefix of this name; marks its block as recently used."""
        prefix = self._found.get(name)
        if prefix is not None:
            self._blocks.move_to_end(id(prefix.block))
        return prefix

    def longest(self, tokens: Tokens, min_tokens: int) -> Prefix | None:
        """The longest prefix, of `min_tokens` or more, that `tokens` begin with."""
        for length in sorted(self._lengths, reverse=True):
            if (
                min_tokens <= length < len(tokens)
                and (found := self.get(tokens[:length])) is not None
            ):
                return found
        return None

    def __contains__(self, block_id: object) -> bool:
        """Whether the block with this id is cached."""
        return block_id in self._blocks

    def trim(self, max_tokens: int, keep: Collection[Hashable]) -> None:
        """Evict blocks whose ids are not in `keep` until at most `max_tokens` are left."""
        for block_id in [block_id for block_id in self._blocks if block_id not in keep]:
            if self.size <= max_tokens:
                return
            self._drop(block_id)

    def clear(self) -> None:
        """Evict all blocks."""
        for block_id in list(self._blocks):
            self._drop(block_id)

    def _drop(self, block_id: int) -> None:
        cached = self._blocks.pop(block_id)
        self.size -= cached.block.size
        for name in cached.names:
            length = self._found.pop(name).length
            self._lengths[length] -= 1
            if not self._lengths[length]:
                del self._lengths[length]


class Prefill:
    """Prefills prompts in order, at most `max_tokens` per round; long ones take several rounds."""

    def __init__(
        self, policy: TorchModel, prefixes: Prefixes, *, max_tokens: int, least_shared: int
    ) -> None:
        self._policy = policy
        self._prefixes = prefixes
        self._max_tokens = max_tokens
        self._least_shared = least_shared
        self._unfinished: dict[Hashable, Block] = {}
        self.tokens_done = 0
        self.tokens_adopted = 0

    @property
    def size(self) -> int:
        """Tokens for which unfinished prefills take memory."""
        return sum(block.size for block in self._unfinished.values())

    def run(self, wanted: dict[Hashable, Tokens]) -> None:
        """Do one round; unfinished prefills that are not wanted are dropped."""
        self._unfinished = {
            name: block for name, block in self._unfinished.items() if name in wanted
        }
        budget, batched = self._max_tokens, list[tuple[Hashable, Tokens]]()
        for name, tokens in wanted.items():
            if budget <= 0:
                break
            block = self._unfinished.get(name)
            if block is None:
                block = self._new_block(tokens, budget)
            if block is None:
                batched.append((name, tokens))
                budget -= len(tokens)
                continue
            missing = len(tokens) - block.done
            if missing > budget and budget * 4 < self._max_tokens:
                break  # a few tokens would cost a whole forward pass
            self._unfinished[name] = block
            budget -= self._extend(name, tokens, min(missing, budget))
        for part in portions(batched):
            self._compute_batch(part)

    def clear(self) -> None:
        """Drop unfinished prefills."""
        self._unfinished.clear()

    def _new_block(self, tokens: Tokens, budget: int) -> Block | None:
        """A block for a prompt; None if it can be batched with others in one forward pass."""
        min_tokens, prefix = self._least_shared, None
        if min_tokens and len(tokens) >= min_tokens:
            prefix = self._prefixes.longest(tokens, min_tokens)
        elif len(tokens) <= budget:
            return None
        block = Block(1, len(tokens))
        if prefix is not None:
            block.adopt(prefix)
            self.tokens_adopted += block.done
        return block

    def _extend(self, name: Hashable, tokens: Tokens, num: int) -> int:
        block = self._unfinished[name]
        self._policy.prefill(block, [tokens[block.done : block.done + num]])
        self.tokens_done += num
        if block.done == len(tokens):
            del self._unfinished[name]
            self._prefixes.add(name, Prefix(block, 0, len(tokens)))
        return num

    def _compute_batch(self, part: Sequence[tuple[Hashable, Tokens]]) -> None:
        block = Block(len(part), max(len(tokens) for _, tokens in part))
        self._policy.prefill(block, [tokens for _, tokens in part])
        for row, (name, tokens) in enumerate(part):
            self._prefixes.add(name, Prefix(block, row, len(tokens)))
            self.tokens_done += len(tokens)


def portions(batched: list[tuple[Hashable, Tokens]]) -> list[list[tuple[Hashable, Tokens]]]:
    """Split into batches of similar lengths, so that there is little padding."""
    found: list[list[tuple[Hashable, Tokens]]] = []
    for item in sorted(batched, key=lambda item: len(item[1])):
        first = len(found[-1][0][1]) if found else 0
        if not found or len(item[1]) > PADDING + 1.25 * first:
            found.append([])
        found[-1].append(item)
    return found
