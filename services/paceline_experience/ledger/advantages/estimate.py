"""Estimates the advantages of a batch once, when it is fixed, and keeps them with it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config.job import JobSpec
from paceline.config.named import NamedPlugin, named
from paceline.config.options import options_source
from paceline.errors import InvalidError, plugin_boundary
from paceline.platform.telemetry.logs import Log
from paceline.platform.text import MAX_NAME, is_name
from paceline.plugins import Advantage, Advantages, Context, EpisodeBatch, declared, registry
from paceline_experience.ledger.generation.memory import Memory
from paceline_experience.ledger.own.parts import NO_PARTS, OwnParts

MAX_NOTES = 100
MAX_ESTIMATE_BYTES = 64 << 20  # compressed; a batch with more has other values for every token
_EPISODES, _TOKENS = b"E", b"T"
Floats = NDArray[np.float64]
log = Log("advantages")


@dataclass(frozen=True, slots=True)
class Part:
    """A plug-in of a job that estimates or changes advantages."""

    plugin: NamedPlugin
    function: Advantage | None  # None: it came with the job
    needs: frozenset[str]
    own: OwnParts = NO_PARTS

    @property
    def name(self) -> str:
        """Its name, under which its memory is kept."""
        return self.plugin.name


@dataclass(frozen=True, slots=True)
class Estimate:
    """The advantages of N episodes with T policy tokens."""

    values: Floats  # [N] or [T]
    weights: Floats | None = None  # [N]; None: all 1
    memory: dict[str, str] = field(default_factory=dict[str, str])  # key -> JSON; empty: deleted
    notes: dict[str, float] = field(default_factory=dict[str, float])

    def encoded(self, episodes: int) -> bytes:
        """As the ledger keeps it: the values and weights, without memory and notes.

        Raises:
            InvalidError: it is too large.
        """
        kind = _EPISODES if len(self.values) == episodes else _TOKENS
        weights = np.ones(episodes) if self.weights is None else self.weights
        columns = np.concatenate((weights, self.values)).astype("<f4")
        data = kind + zlib.compress(columns.tobytes(), 1)
        if len(data) > MAX_ESTIMATE_BYTES:
            raise InvalidError(
                f"experience.advantage: the advantages of a batch take {len(data)} bytes; "
                f"at most {MAX_ESTIMATE_BYTES} are kept"
            )
        return data


def decoded(data: bytes, lengths: Sequence[int]) -> tuple[list[NDArray[np.float32]], list[float]]:
    """The values of each episode, one or one per policy token, and the weights [N].

    Raises:
        ValueError: the data does not fit episodes of these lengths.
    """
    columns = np.frombuffer(zlib.decompress(data[1:]), "<f4")
    weights, values = columns[: len(lengths)].tolist(), columns[len(lengths) :]
    due = len(lengths) if data[:1] == _EPISODES else sum(lengths)
    if len(values) != due:
        raise ValueError(f"{len(values)} advantages for {due} episodes or tokens")
    if data[:1] == _EPISODES:
        return list(values.reshape(-1, 1)), weights
    return np.split(values, np.cumsum(lengths)[:-1]), weights


def parts_of(spec: JobSpec, own: OwnParts = NO_PARTS) -> list[Part]:
    """The plug-ins of a job that estimate advantages, in the order of their calls.

    Raises:
        InvalidError: one is not installed.
    """
    return [_part(each, own) for each in named(spec) if each.kind == "advantages"]


def _part(plugin: NamedPlugin, own: OwnParts) -> Part:
    if plugin.is_own:
        return Part(plugin, None, own.needs(plugin), own)
    function = registry.find(plugin.kind, plugin.name)
    source = options_source(plugin.kind, plugin.name, import_plugin=True)
    needs = frozenset(declared(source).needs_with(plugin.options))
    return Part(plugin, function, needs)


async def estimate(
    parts: Sequence[Part], batch: EpisodeBatch, context: Context, memory: Memory
) -> Estimate:
    """Call the parts in order.

    Raises:
        InvalidError: one has raised, or returned something else than finite numbers of the right
            shape.
        UnavailableError: one that came with the job cannot be called for now.
    """
    found = Estimate(np.zeros(0))
    for part in parts:
        own = memory.of(part.name) if "memory" in part.needs else None
        without = replace(context, outcomes=(), metrics=())
        given = without if own is None else replace(context, memory=own)
        raw: Advantages | None = None
        if part.function is None:
            kept = {} if own is None else memory.texts(part.name)
            raw = await part.own.advantages(part.plugin, batch, given, kept)
        report = partial(log.exception, "an advantage has failed", advantage=part.name)
        with plugin_boundary(f"{part.plugin.options_field}: {part.name}", report=report):
            if part.function is None:
                answer = checked(raw, batch)
            else:
                answer = called(part.function, batch, given, part.plugin.options)
            changed = dict(answer.memory)
            if changed and own is None:
                raise TypeError("it changes its memory, but does not declare the need 'memory'")
            texts = memory.changed(part.name, changed) if changed else {}
        weights = answer.weights if answer.weights is not None else batch.weights
        batch = replace(batch, advantages=answer.values, weights=weights)
        found = Estimate(
            answer.values, weights, found.memory | texts, {**found.notes, **answer.notes}
        )
    return found


def called(
    function: Advantage, batch: EpisodeBatch, context: Context, options: Mapping[str, Any]
) -> Advantages:
    """Call an advantage on a batch; it may raise anything.

    Raises:
        TypeError: the answer has another shape.
        ValueError: it or a note is not finite, or a weight is negative.
    """
    return checked(function(batch, context, **options), batch)


def checked(answer: Any, batch: EpisodeBatch) -> Advantages:
    """What an advantage has returned for a batch; raises as `called`."""
    if not isinstance(answer, Advantages):
        answer = Advantages(answer)
    values = np.asarray(answer.values, dtype=np.float64)
    episodes, tokens = len(batch.rewards), int(batch.lengths.sum())
    if values.shape not in ((episodes,), (tokens,)):
        raise TypeError(
            f"an answer of shape {values.shape}; one number per episode ({episodes}) "
            f"or per policy token ({tokens}) is needed"
        )
    _finite(values)
    notes = {str(name): float(value) for name, value in answer.notes.items()}
    _finite(np.array([*notes.values()], np.float64))
    if len(notes) > MAX_NOTES:
        raise ValueError(f"{len(notes)} notes; at most {MAX_NOTES} are allowed")
    if (wrong := next((name for name in notes if not is_name(name)), None)) is not None:
        raise ValueError(f"a note named {wrong[:40]!r}; {MAX_NAME} printable characters at most")
    answer = replace(answer, notes=notes)
    if answer.weights is None:
        return replace(answer, values=values)
    weights = np.asarray(answer.weights, dtype=np.float64)
    if weights.shape != (episodes,):
        raise TypeError(f"weights of shape {weights.shape}; one per episode ({episodes}) is needed")
    _finite(weights)
    if (weights < 0).any():
        raise ValueError(f"weights must not be negative; it gave {weights.min()}")
    return replace(answer, values=values, weights=weights)


def _finite(values: Floats) -> None:
    wrong = values[~(np.abs(values) <= np.finfo(np.float32).max)]
    if wrong.size:
        raise ValueError(f"finite numbers of 32 bits are due; it gave {wrong[0]}")
