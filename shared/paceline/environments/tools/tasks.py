"""Questions for the world of tools; each kind needs other tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from paceline.environments.tool_calls import ParserName, tool_parser
from paceline.environments.tools.corpus import NUM_FACTS, NUM_KINDS, fact
from paceline.errors import InvalidError
from paceline.platform.digest import Permutation, task_id
from paceline.types import Task

ToolName = Literal["calculator", "search", "notes"]
Kind = Literal["calculate", "look_up", "compare", "recall"]
TOOLS: tuple[ToolName, ...] = ("calculator", "search", "notes")
MAX_TURNS, MAX_RESULTS = 64, 10
SYSTEM = "Use the tools. Once you know the answer, reply with the number alone."
_ENVIRONMENT = "tools"
_MAX_SIZE = 10_000_000
_MAX_SYSTEM_CHARS = 4096
_HELDOUT_SHARE = 5  # one question in this many is held out
_FIRST, _NUMBERS = 11, 89  # operands are 11 to 99
_NEIGHBOURS = (NUM_FACTS // NUM_KINDS - 1) // 2


@dataclass(frozen=True, slots=True)
class Question:
    """A question about numbers, and what the notes say when it is asked."""

    text: str
    answer: int
    notes: dict[str, str]


class ToolTasks:
    """`size` questions of all kinds whose tools there are, or only of `kinds`.

    Each question belongs to one split, whatever the seed, which picks the order; a kind whose
    questions are used up begins again. A task allows twice as many turns as it needs, but at most
    `max_turns`.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        tools: Sequence[ToolName] = TOOLS,
        kinds: Sequence[Kind] | None = None,
        tool_parser: ParserName = "hermes",
        max_turns: Annotated[int, Field(ge=1, le=MAX_TURNS)] = 8,
        results: Annotated[int, Field(ge=1, le=MAX_RESULTS)] = 3,
        system_prompt: Annotated[str, Field(max_length=_MAX_SYSTEM_CHARS)] = SYSTEM,
        split: Literal["train", "heldout"] = "train",
        size: Annotated[int, Field(ge=1, le=_MAX_SIZE)] = 10_000,
    ) -> None:
        check(tools=tools, parser=tool_parser, max_turns=max_turns, results=results)
        if split not in ("train", "heldout"):
            raise InvalidError(f"tasks.options.split: {split!r}; allowed: train, heldout")
        if not 1 <= size <= _MAX_SIZE:
            raise InvalidError(f"tasks.options.size: {size}; allowed: 1 to {_MAX_SIZE}")
        del system_prompt
        self._size = size
        self._pools = [_Pool(kind, split, seed) for kind in _kinds(tools, kinds)]

    def __len__(self) -> int:
        """Number of tasks in one epoch."""
        return self._size

    def __getitem__(self, position: int, /) -> Task:
        """The task at a position; kinds take turns."""
        if not 0 <= position < self._size:
            raise IndexError(position)
        rank, which = divmod(position, len(self._pools))
        pool = self._pools[which]
        question = pool.question(rank)
        payload = json.dumps(
            {
                "question": question.text,
                "answer": str(question.answer),
                "notes": question.notes,
                "max_turns": 2 * pool.family.turns,
            }
        )
        domain = f"tools/{pool.kind}"
        return Task(task_id(_ENVIRONMENT, payload, 0), _ENVIRONMENT, payload, domain=domain)


class _Pool:
    """The questions of a kind in one split."""

    def __init__(self, kind: Kind, split: str, seed: int) -> None:
        self.kind, self.family = kind, _KINDS[kind]
        num_heldout = self.family.count // _HELDOUT_SHARE
        num_train = self.family.count - num_heldout
        self._start, self._size = (0, num_train) if split == "train" else (num_train, num_heldout)
        # The key must not depend on any option that may differ between train and heldout.
        self._split = Permutation(self.family.count, ("split", kind))
        self._order = Permutation(self._size, (seed, "order", kind))

    def question(self, rank: int) -> Question:
        """One of them, in the order of the seed."""
        return self.family.ask(self._split(self._start + self._order(rank % self._size)))


def check(*, tools: Sequence[str], parser: str, max_turns: int, results: int) -> None:
    """Raise `InvalidError` for options of the world that are not allowed."""
    unknown = [name for name in tools if name not in TOOLS]
    if unknown or not tools or len(set(tools)) < len(tools):
        raise InvalidError(
            f"tasks.options.tools: {(unknown or list(tools))[:9]}; allowed: {', '.join(TOOLS)}, "
            "each once"
        )
    tool_parser(parser)
    if not 1 <= max_turns <= MAX_TURNS:
        raise InvalidError(f"tasks.options.max_turns: {max_turns}; allowed: 1 to {MAX_TURNS}")
    if not 1 <= results <= MAX_RESULTS:
        raise InvalidError(f"tasks.options.results: {results}; allowed: 1 to {MAX_RESULTS}")


def _kinds(tools: Sequence[str], kinds: Sequence[Kind] | None) -> list[Kind]:
    possible: list[Kind] = [kind for kind, family in _KINDS.items() if family.tools <= set(tools)]
    wrong = [kind for kind in kinds or () if kind not in possible]
    if wrong or not possible or (kinds is not None and not kinds):
        raise InvalidError(
            f"tasks.options.kinds: {wrong[:9] or kinds}; with these tools allowed: "
            f"{', '.join(possible) or 'none'}"
        )
    return possible if kinds is None else list(kinds)


def _calculate(index: int) -> Question:
    rest, which = divmod(index, 3)
    a, b = (_FIRST + offset for offset in divmod(rest, _NUMBERS))
    name, value = (("+", a + b), ("-", a - b), ("*", a * b))[which]
    return Question(f"What is {a} {name} {b}?", value, {})


def _look_up(index: int) -> Question:
    chosen = fact(index)
    return Question(f"How {chosen.adjective} is {chosen.place}, in {chosen.unit}?", chosen.size, {})


def _compare(index: int) -> Question:
    """Two places of a kind; each pair has one index."""
    which, apart = divmod(index, _NEIGHBOURS)
    two = fact(which), fact((which + NUM_KINDS * (apart + 1)) % NUM_FACTS)
    more, less = sorted(two, key=lambda candidate: -candidate.size)
    text = f"How much {more.comparative} is {more.place} than {less.place}, in {more.unit}?"
    return Question(text, more.size - less.size, {})


def _recall(index: int) -> Question:
    rest, added = divmod(index, _NUMBERS)
    which, value = divmod(rest, _NUMBERS)
    name, added, value = fact(which).name, _FIRST + added, _FIRST + value
    text = f"What is the number in the note {name}, plus {added}?"
    return Question(text, value + added, {name: str(value)})


@dataclass(frozen=True, slots=True)
class _Making:
    """How many questions of a kind there are, how the n-th is asked, and what it needs."""

    count: int
    ask: Callable[[int], Question]
    tools: frozenset[str]
    turns: int  # with one call in each


_KINDS: dict[Kind, _Making] = {
    "calculate": _Making(3 * _NUMBERS**2, _calculate, frozenset({"calculator"}), 2),
    "look_up": _Making(NUM_FACTS, _look_up, frozenset({"search"}), 2),
    "compare": _Making(NUM_FACTS * _NEIGHBOURS, _compare, frozenset({"calculator", "search"}), 4),
    "recall": _Making(NUM_FACTS * _NUMBERS**2, _recall, frozenset({"calculator", "notes"}), 3),
}
