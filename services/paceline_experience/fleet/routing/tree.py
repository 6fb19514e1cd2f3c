"""A tree of names under one root, with fast ancestor queries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from paceline.errors import StateError

ROOT = ""  # the trainer's seeds


class Tree:
    """Parents and ordered children, without cycles. `behind` means: in the subtree of."""

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
        """The parent of a name other than the root."""
        return self._parents[name]

    def children(self, name: str) -> list[str]:
        """Children in the order in which they were attached; a copy."""
        return list(self._children[name])

    def leaves(self) -> list[str]:
        """Names without children."""
        return list(self._leaves)

    def attach(self, name: str, parent: str) -> None:
        """Add a leaf."""
        self._children[name] = {}
        self._leaves[name] = None
        self._link(name, parent)

    def move(self, name: str, parent: str) -> None:
        """Move a subtree under another parent.

        Raises:
            StateError: the parent is behind `name`.
        """
        if self._parents[name] == parent:
            return
        if parent == name or (self._children[name] and name in self._up(parent)):
            raise StateError(f"{parent} is behind {name}: that would be a cycle")
        self._detach(name)
        self._link(name, parent)

    def remove(self, name: str) -> None:
        """Remove a leaf.

        Raises:
            StateError: it has children.
        """
        if self._children[name]:
            raise StateError(f"{name} has {len(self._children[name])} children: move them first")
        self._detach(name)
        del self._parents[name], self._children[name], self._leaves[name]

    def ancestors(self, name: str) -> Iterator[str]:
        """Ancestors from the parent up, without the root."""
        return self._up(self._parents[name])

    def below(self, names: Iterable[str]) -> set[str]:
        """These and all names in their subtrees."""
        found, todo = set[str](), list(names)
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo.extend(self._children[name])
        return found

    def behind(self, name: str, other: str) -> bool:
        """Whether `name` is `other` or in its subtree."""
        if not self._children[other]:
            return name == other
        spans = self._spans if self._spans is not None else self._number()
        begin, end = spans[other]
        return begin <= spans[name][0] < end

    def _link(self, name: str, parent: str) -> None:
        self._parents[name] = parent
        self._children[parent][name] = None
        self._leaves.pop(parent, None)
        self._spans = None

    def _detach(self, name: str) -> None:
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
        """The span of each name's subtree in depth-first order, so that `behind` is O(1)."""
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
