"""Estimates the advantages of a job's batches, and reads back what was kept of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from paceline.errors import IntegrityError
from paceline.plugins import Context, EpisodeBatch
from paceline_experience.ledger.advantages.episodes import NEEDS_PAYLOADS, episode_batch
from paceline_experience.ledger.advantages.estimate import decoded, estimate, parts_of
from paceline_experience.ledger.context import LedgerContext
from paceline_experience.ledger.generation.memory import Memory
from paceline_experience.ledger.own.parts import NO_PARTS, OwnParts
from paceline_experience.ledger.own.plugin import OwnPlugin
from paceline_experience.ledger.records import OutcomeRecord, parse_record
from paceline_experience.ledger.state import GroupRecord
from paceline_experience.store.payloads import PayloadStore

METRIC_STEPS = 20
_ROWS = 3 * METRIC_STEPS  # rows of evals and of steps that were trained again lie between


@dataclass(frozen=True, slots=True)
class FixedEstimate:
    """What `take.lua` writes together with a batch, and numbers for the log."""

    script_arguments: tuple[bytes, str, str]
    notes: dict[str, float]
    memory: Memory  # as it is once that is written


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the advantages of a batch are made from; `observed`: groups with outcomes in it."""

    batch: EpisodeBatch
    context: Context
    memory: Memory
    observed: list[str]


class Estimator:
    """The advantages of a job: a base, and what shapes it."""

    def __init__(self, core: LedgerContext, own: OwnParts = NO_PARTS) -> None:
        """`own`: the advantages that came with the job."""
        self._core = core
        self._parts = parts_of(core.spec, own)
        self._needs = frozenset[str]().union(*(part.needs for part in self._parts))

    @property
    def observes(self) -> bool:
        """Whether any plug-in is told of all decided groups."""
        return "memory" in self._needs or bool(self._core.learners)

    @property
    def slow(self) -> bool:
        """Whether some came with the job, so that answers may be a long time coming."""
        own = any(part.function is None for part in self._parts)
        return own or any(isinstance(each, OwnPlugin) for each in self._core.learners)

    async def gather(
        self, groups: Sequence[GroupRecord], step: int, *, payloads: PayloadStore
    ) -> Inputs:
        """Inside a transaction: what the advantages of a batch are made from."""
        context, memory, observed = await self._context(step)
        read = not NEEDS_PAYLOADS.isdisjoint(self._needs)
        names = [name for group in groups for name in group.member_payloads()] if read else []
        blobs = await payloads.get(names)
        batch = episode_batch(groups, needs=self._needs, payloads=blobs)
        return Inputs(batch, context, memory, observed)

    async def compute(self, inputs: Inputs) -> FixedEstimate:
        """The advantages of a batch that is about to be fixed.

        What samplers learn meanwhile is written with them.

        Raises:
            InvalidError: a plug-in has failed.
            UnavailableError: one that came with the job cannot be called for now.
        """
        context, memory = inputs.context, inputs.memory
        found = await estimate(self._parts, inputs.batch, context, memory)
        data = found.encoded(len(inputs.batch.rewards))
        texts = dict(found.memory)
        for learner in self._core.learners:
            texts.update(await learner.learn(context, memory))
        memory.apply(texts)
        arguments = (data, json.dumps(texts), json.dumps(inputs.observed))
        return FixedEstimate(arguments, found.notes, memory)

    async def kept(
        self, step: int, groups: Sequence[GroupRecord]
    ) -> tuple[list[NDArray[np.float32]], list[float]]:
        """The advantages of each episode of a fixed batch, and their weights [N].

        Raises:
            IntegrityError: they are gone from the store.
        """
        core = self._core
        data = await core.store.command("HGET", core.keys.advantages, step)
        if data is None:
            raise IntegrityError(f"the advantages of step {step} are gone from the store")
        return decoded(data, [e.policy_tokens for group in groups for e in group.members()])

    async def _context(self, step: int) -> tuple[Context, Memory, list[str]]:
        """The context of a step, the memory, and the groups whose outcomes are in the context."""
        core = self._core
        context = Context(step, core.spec.stop.steps, core.spec.tasks.seed)
        if not self.observes:
            return context, Memory(), []
        texts, outcomes = await core.store.hashes(core.keys.memory, core.keys.outcomes)
        records = [parse_record(OutcomeRecord, text) for text in outcomes.values()]
        records.sort(key=lambda each: each.seq)
        rows: list[bytes] = await core.store.command("LRANGE", core.keys.metrics, -_ROWS, -1)
        found = replace(
            context,
            outcomes=[each.outcome() for each in records],
            metrics=_metrics([json.loads(row) for row in rows], step),
        )
        return found, Memory(texts), [name.decode() for name in outcomes]


def _metrics(rows: Sequence[Mapping[str, Any]], step: int) -> list[dict[str, float]]:
    """The trainer's metrics of the last steps; of a step that was trained again the last ones."""
    by_step = {row["step"]: row["values"] for row in rows if row["kind"] == "train"}
    newest = sorted(each for each in by_step if each <= step)[-METRIC_STEPS:]
    return [cast("dict[str, float]", by_step[each]) for each in newest]
