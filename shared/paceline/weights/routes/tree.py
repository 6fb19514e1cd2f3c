"""A tree of names under one root that can be asked who is behind whom."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from paceline.errors import StateError

ROOT = ""  # the trainer's seeds


class Tree:
    """Parents and ordered children; never a loop."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}
        self._children: dict[str, dict[str, None]] = {ROOT: {}}
        self._leaves: dict[str, None] = {}
        self._spans: dict[str, tuple[int, int]] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._parents

    def __iter__(self) -> Iterator[str]:
        return iter(self._parents)

    def __len__(self) -> int:
        return len(self._parents)

    def parent(self, name: str) -> str:
        """Of a name other than the root."""
        return self._parents[name]

    def children(self, name: str) -> list[str]:
        """In the order in which they came; a copy."""
        return list(self._children[name])

    def leaves(self) -> list[str]:
        """Behind whom nobody is."""
        return list(self._leaves)

    def attach(self, name: str, parent: str) -> None:
        """A new leaf."""
        self._children[name] = {}
        self._leaves[name] = None
        self._hang(name, parent)

    def move(self, name: str, parent: str) -> None:
        """Under another parent, with all that is behind it.

        Raises:
            StateError: the parent is behind `name`.
        """
        if self._parents[name] == parent:
            return
        if parent == name or (self._children[name] and name in self._up(parent)):
            raise StateError(f"{parent} is behind {name}: that would be a loop")
        self._unhang(name)
        self._hang(name, parent)

    def remove(self, name: str) -> None:
        """Take a leaf away.

        Raises:
            StateError: somebody is behind it.
        """
        if self._children[name]:
            raise StateError(f"{name} has {len(self._children[name])} children: move them first")
        self._unhang(name)
        del self._parents[name], self._children[name], self._leaves[name]

    def ancestors(self, name: str) -> Iterator[str]:
        """From the parent up, without the root."""
        return self._up(self._parents[name])

    def below(self, names: Iterable[str]) -> set[str]:
        """These and all who get their bytes through one of them."""
        found, todo = set[str](), list(names)
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo.extend(self._children[name])
        return found

    def behind(self, name: str, other: str) -> bool:
        """Whether `name` is `other` or gets its bytes through it."""
        if not self._children[other]:
            return name == other
        spans = self._spans if self._spans is not None else self._number()
        begin, end = spans[other]
        return begin <= spans[name][0] < end

    def _hang(self, name: str, parent: str) -> None:
        self._parents[name] = parent
        self._children[parent][name] = None
        self._leaves.pop(parent, None)
        self._spans = None

    def _unhang(self, name: str) -> None:
        parent = self._parents[name]
        del self._children[parent][name]
        if parent != ROOT and not self._children[parent]:
            self._leaves[parent] = None
        self._spans = None

    def _up(self, name: str) -> Iterator[str]:
        while name != ROOT:
            yield name
            name = self._parents[name]

    def _number(self) -> dict[str, tuple[int, int]]:
        """For each name the span of its subtree in depth-first order, so `behind` is O(1)."""
        begins: dict[str, int] = {}
        spans: dict[str, tuple[int, int]] = {}
        todo: list[tuple[str, bool]] = [(ROOT, False)]
        while todo:
            name, closing = todo.pop()
            if closing:
                spans[name] = (begins[name], len(begins))
                continue
            begins[name] = len(begins)
            todo.append((name, True))
            todo.extend((child, False) for child in self._children[name])
        self._spans = spans
        return spans
