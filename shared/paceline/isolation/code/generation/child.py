"""Calls the sampler, allocator and replay of a job's own code, in its sealed process.

An answer depends on what is asked alone: the state and the memory come with each call. Instances
are kept between calls, but only to save the time of making them.
"""

from __future__ import annotations

import json
import operator
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from paceline.isolation.code.generation.messages import LACKS_MEMORY, open_group_of, pick_of_fields
from paceline.isolation.code.generation.replay import (
    checked_guests,
    checked_places,
    guest_fields,
    stored_of,
)
from paceline.isolation.code.generation.starts import checked_starts, pick_text, runs_of, runs_text
from paceline.isolation.signature import place_of
from paceline.plugins import MAX_CURSOR_BYTES, Context, Learns, Pick, Start

AT_ONCE_S = 0.5  # a call draws no more tasks after this time
_AS_MADE = "{}"  # the state of a sampler that has drawn nothing


class _Instance:
    """A plug-in, the state at which it stands, and the memory with which it draws."""

    def __init__(self, plugin: Any) -> None:
        self.plugin = plugin
        self.at = _AS_MADE
        self.memory: int | None = None


class Generation:
    """The plug-ins of a process, by what they are made with."""

    def __init__(self) -> None:
        self._instances: dict[str, _Instance] = {}

    def answer(self, make: Callable[..., Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a call; raises whatever the plug-in raises, and what is wrong with it."""
        name = json.dumps([fields[each] for each in ("target", "options", "args", "given")])
        if fields.get("fresh"):
            self._instances.pop(name, None)
        memory = fields["memory"]
        if memory is not None and not self._remembers(name, memory, fields):
            return LACKS_MEMORY
        try:
            instance = self._instances.get(name)
            if instance is None or not self._is_at(instance, fields):
                instance = _Instance(make(*fields["args"], **fields["given"], **fields["options"]))
                self._instances[name] = instance
            if memory is not None and instance.memory != memory:
                texts: dict[str, str] = fields["texts"]
                instance.plugin.remember({key: json.loads(text) for key, text in texts.items()})
                instance.memory = memory
            _restore(instance, fields)
            return _CALLS[fields["op"]](instance, fields)
        except BaseException:  # whatever it was about, it may be half done
            self._instances.pop(name, None)
            raise

    def _remembers(self, name: str, memory: int, fields: Mapping[str, Any]) -> bool:
        instance = self._instances.get(name)
        known = instance is not None and instance.memory == memory and self._is_at(instance, fields)
        return known or "texts" in fields

    def _is_at(self, instance: _Instance, fields: Mapping[str, Any]) -> bool:
        """Whether it can go on to the state of a call; one cannot go back to the beginning."""
        return fields.get("state") != {} or instance.at == _AS_MADE


def _restore(instance: _Instance, fields: Mapping[str, Any]) -> None:
    state = fields.get("state")
    if state is not None and (text := json.dumps(state)) != instance.at:
        instance.plugin.load(state)
        instance.at = text


def _drawn(instance: _Instance, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Up to `count` tasks, each with the state after it; `over`: there are no more."""
    sampler, until = instance.plugin, time.monotonic() + AT_ONCE_S
    size: int = fields["args"][0]
    draws: list[list[Any]] = []
    while len(draws) < fields["count"] and (not draws or time.monotonic() < until):
        found = sampler.next()
        if found is None:
            return {"draws": draws, "over": True}
        draws.append([*_checked_pick(sampler, found, size), _state(instance)])
    return {"draws": draws, "over": False}


def _checked_pick(sampler: Any, found: Any, size: int) -> list[Any]:
    place = place_of(sampler.next)
    try:
        pick = found if isinstance(found, Pick) else Pick(operator.index(found))
        task = operator.index(pick.task)
        if not 0 <= task < size:
            raise ValueError(f"task {task} of {size}; positions go from 0 to {size - 1}")
        pick_text(pick.variant, pick.meta)
    except (TypeError, ValueError) as error:
        raise type(error)(f"next() returned {_shown(found)}: {error}{place}") from None
    return [task, str(pick.variant), dict(pick.meta)]


def _state(instance: _Instance) -> Any:
    """The sampler's state as it is kept; raises if it is no JSON or too large."""
    place = place_of(instance.plugin.state)
    try:
        text = json.dumps(dict(instance.plugin.state()), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise type(error)(f"state() is not JSON: {error}{place}") from None
    if len(text) > MAX_CURSOR_BYTES:
        what = f"state() has {len(text)} bytes; at most {MAX_CURSOR_BYTES} are allowed"
        raise ValueError(f"{what}{place}")
    state = json.loads(text)
    instance.at = json.dumps(state)
    return state


def _observed(instance: _Instance, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the memory that change."""
    from paceline.isolation.code.ledger_messages import context_of

    context = context_of({**fields["context"], "memory": fields["texts"]})
    changed = instance.plugin.observe(context.outcomes, context)
    if not isinstance(changed, Mapping):
        what = f"observe() returned {_shown(changed)}; a mapping is needed"
        raise TypeError(f"{what}{place_of(instance.plugin.observe)}")
    return {"changed": dict(changed)}


def _started(instance: _Instance, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The first wave of each of some groups, in runs."""
    start = instance.plugin.start
    picks = map(pick_of_fields, fields["picks"])
    context = _context(fields)
    waves = [_checked_wave(start(pick, context), start, least=1) for pick in picks]
    return {"waves": [runs_of(wave) for wave in waves]}


def _more(instance: _Instance, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The next wave of a group, in runs."""
    more = instance.plugin.more
    found = more(open_group_of(fields["group"]), _context(fields))
    return {"wave": runs_of(_checked_wave(found, more, least=0))}


def _enough(instance: _Instance, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Whether a group is closed with what has finished."""
    return {"enough": bool(instance.plugin.enough(open_group_of(fields["group"])))}


def _checked_wave(starts: Any, method: Any, *, least: int) -> list[Start]:
    try:
        found = checked_starts(starts, least=least)
        runs_text(found)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{method.__name__}() returned {error}{place_of(method)}") from None
    return found


def _offered(instance: _Instance, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The guests of a group: the place of each, and of what it replaces."""
    from paceline.isolation.code.ledger_messages import group_of

    offer, group = instance.plugin.offer, group_of(fields["group"])
    stored = stored_of(fields["stored"])
    answer = offer(group, stored, _context(fields))
    with _of_method(offer):
        found = checked_guests(answer, len(group.rewards), len(stored))
    return {"guests": guest_fields(found)}


def _kept(instance: _Instance, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Places of the episodes of a group that are stored."""
    from paceline.isolation.code.ledger_messages import group_of

    keep, group = instance.plugin.keep, group_of(fields["group"])
    answer = keep(group, _context(fields))
    with _of_method(keep):
        return {"kept": list(checked_places(answer, len(group.rewards)))}


@contextmanager
def _of_method(method: Any) -> Generator[None]:
    """What is wrong with an answer is wrong at the place of the method."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{method.__name__}() returned {error}{place_of(method)}") from None


def _context(fields: Mapping[str, Any]) -> Context:
    return Context(*fields["context"])


def _shown(value: Any) -> str:
    return repr(value)[:100]


_CALLS: dict[str, Callable[[_Instance, Mapping[str, Any]], dict[str, Any]]] = {
    "draw": _drawn,
    "observe": _observed,
    "start": _started,
    "more": _more,
    "enough": _enough,
    "offer": _offered,
    "keep": _kept,
}
OPERATIONS = frozenset(_CALLS)


def methods_of(kind: str, plugin: type) -> tuple[list[str], str]:
    """The optional methods that a class has, and what it lacks; empty: nothing."""
    due, optional = _METHODS[kind]
    have = {name for name in (*due, *optional) if callable(getattr(plugin, name, None))}
    learns = not _LEARNING.isdisjoint(optional) and issubclass(plugin, Learns)
    if learns is not bool(have & _LEARNING):
        due = (*due, *sorted(_LEARNING))
    missing = [name for name in due if name not in have]
    lacks = f"has no method {', '.join(missing)}; it needs {', '.join(due)}" if missing else ""
    return [name for name in optional if name in have], lacks


_LEARNING = frozenset({"remember", "observe"})
_METHODS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "samplers": (("next", "state", "load"), ("remember", "observe")),
    "allocators": (("start", "more"), ("remember", "observe", "enough")),
    "replays": (("keep", "offer"), ()),
}
