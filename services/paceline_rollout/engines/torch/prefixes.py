"""Prefills that later requests may use, and the one that is under way."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field

from paceline_rollout.engines.torch.cache import Block, Prefix
from paceline_rollout.engines.torch.model import Policy

PADDING = 32  # tokens by which contexts of one pass may always differ
Tokens = tuple[int, ...]


@dataclass(slots=True)
class _Kept:
    block: Block
    names: list[Hashable] = field(default_factory=list[Hashable])


class Prefixes:
    """Prefixes by name; when memory is short, blocks go, the longest unused one first."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Prefix] = {}
        self._blocks: OrderedDict[int, _Kept] = OrderedDict()
        self._lengths: Counter[int] = Counter()
        self.size = 0  # tokens

    def add(self, name: Hashable, prefix: Prefix) -> None:
        """Keep one."""
        kept = self._blocks.get(id(prefix.block))
        if kept is None:
            kept = self._blocks[id(prefix.block)] = _Kept(prefix.block)
            self.size += prefix.block.size
        kept.names.append(name)
        self._found[name] = prefix
        self._lengths[prefix.length] += 1

    def get(self, name: Hashable) -> Prefix | None:
        """The one of this name."""
        prefix = self._found.get(name)
        if prefix is not None:
            self._blocks.move_to_end(id(prefix.block))
        return prefix

    def longest(self, tokens: Tokens, least: int) -> Prefix | None:
        """The longest one, of `least` tokens or more, that is named by the start of `tokens`."""
        for length in sorted(self._lengths, reverse=True):
            if least <= length < len(tokens) and (found := self.get(tokens[:length])) is not None:
                return found
        return None

    def __contains__(self, number: object) -> bool:
        """Whether the block with this id is kept."""
        return number in self._blocks

    def trim(self, most: int, keep: Collection[Hashable]) -> None:
        """Let go until at most so many tokens are left, but not of blocks with these ids."""
        for number in [number for number in self._blocks if number not in keep]:
            if self.size <= most:
                return
            self._drop(number)

    def clear(self) -> None:
        """Let go of all."""
        for number in list(self._blocks):
            self._drop(number)

    def _drop(self, number: int) -> None:
        kept = self._blocks.pop(number)
        self.size -= kept.block.size
        for name in kept.names:
            length = self._found.pop(name).length
            self._lengths[length] -= 1
            if not self._lengths[length]:
                del self._lengths[length]


class Prefill:
    """Computes contexts in order, at most `most` tokens a round; long ones take several."""

    def __init__(self, policy: Policy, prefixes: Prefixes, *, most: int, least_shared: int) -> None:
        self._policy = policy
        self._prefixes = prefixes
        self._most = most
        self._least_shared = least_shared
        self._begun: dict[Hashable, Block] = {}
        self.tokens_done = 0
        self.tokens_adopted = 0

    @property
    def size(self) -> int:
        """Tokens for which unfinished ones take memory."""
        return sum(block.size for block in self._begun.values())

    def run(self, wanted: dict[Hashable, Tokens]) -> None:
        """One round; what is begun and no longer wanted is given up."""
        self._begun = {name: block for name, block in self._begun.items() if name in wanted}
        left, whole = self._most, list[tuple[Hashable, Tokens]]()
        for name, tokens in wanted.items():
            if left <= 0:
                break
            block = self._begun.get(name)
            if block is None:
                block = self._begin(tokens, left)
            if block is None:
                whole.append((name, tokens))
                left -= len(tokens)
                continue
            todo = len(tokens) - block.done
            if todo > left and left * 4 < self._most:
                break  # a crumb would cost a whole pass
            self._begun[name] = block
            left -= self._extend(name, tokens, min(todo, left))
        for part in portions(whole):
            self._together(part)

    def clear(self) -> None:
        """Give up what is begun."""
        self._begun.clear()

    def _begin(self, tokens: Tokens, left: int) -> Block | None:
        """None: it can be computed with others, in one go."""
        least, known = self._least_shared, None
        if least and len(tokens) >= least:
            known = self._prefixes.longest(tokens, least)
        elif len(tokens) <= left:
            return None
        block = Block(1, len(tokens))
        if known is not None:
            block.adopt(known)
            self.tokens_adopted += block.done
        return block

    def _extend(self, name: Hashable, tokens: Tokens, num: int) -> int:
        block = self._begun[name]
        self._policy.prefill(block, [tokens[block.done : block.done + num]])
        self.tokens_done += num
        if block.done == len(tokens):
            del self._begun[name]
            self._prefixes.add(name, Prefix(block, 0, len(tokens)))
        return num

    def _together(self, part: Sequence[tuple[Hashable, Tokens]]) -> None:
        block = Block(len(part), max(len(tokens) for _, tokens in part))
        self._policy.prefill(block, [tokens for _, tokens in part])
        for row, (name, tokens) in enumerate(part):
            self._prefixes.add(name, Prefix(block, row, len(tokens)))
            self.tokens_done += len(tokens)


def portions(whole: list[tuple[Hashable, Tokens]]) -> list[list[tuple[Hashable, Tokens]]]:
    """Cut so that padding stays small: one portion has contexts of similar length."""
    found: list[list[tuple[Hashable, Tokens]]] = []
    for one in sorted(whole, key=lambda one: len(one[1])):
        first = len(found[-1][0][1]) if found else 0
        if not found or len(one[1]) > PADDING + 1.25 * first:
            found.append([])
        found[-1].append(one)
    return found
