"""Decoupled PPO that writes down what it was given: the trainer's own record of each batch.

A sequence is known by the log-probs that the engine reported for it, which nobody changes on the
way and which an export of trajectories has too.
"""

from __future__ import annotations

import inspect
import sys
from functools import cache
from hashlib import blake2b
from pathlib import Path
from types import FrameType

import numpy as np
import yaml
from chaos.journal import Journal

from paceline.methods.decoupled_ppo.objective import decoupled_ppo
from paceline.methods.decoupled_ppo.options import DecoupledOptions
from paceline.methods.parts.batch import Loss, TokenBatch


class RecordedOptions(DecoupledOptions):
    """Options of `recorded`."""

    notes: str
    """Folder of the journal."""


def recorded(batch: TokenBatch, options: RecordedOptions) -> Loss:
    """As `decoupled_ppo` says, once it is written down."""
    _record(options.notes).take(batch, _step_of_caller())
    return decoupled_ppo(batch, options)


def fingerprint(logprobs: np.ndarray) -> str:
    """Of the log-probs of a sequence, as float32."""
    return blake2b(logprobs.astype(np.float32).tobytes(), digest_size=8).hexdigest()


class Record:
    """Collects micro-batches to whole batches; one for each process."""

    def __init__(self, notes: str) -> None:
        settings = yaml.safe_load(Path(sys.argv[-1]).read_text())
        self._journal = Journal(Path(notes), "trainer")
        self._about = {
            "job": settings["job_id"],
            "incarnation": settings["options"]["incarnation"],
        }
        self._found: list[str] = []

    def take(self, batch: TokenBatch, step: int) -> None:
        """A micro-batch of a step; the last one of a batch makes a line."""
        owner = batch.sequences.numpy()
        values = batch.behaviour.numpy()
        found = [fingerprint(values[owner == i]) for i in range(batch.num_sequences)]
        self._found += found
        if len(self._found) >= batch.scale.sequences:
            self._journal.note("batch", step=step, prints=self._found, **self._about)
            self._found = []


@cache
def _record(notes: str) -> Record:
    return Record(notes)


def _step_of_caller() -> int:
    """An objective is not told the step; the learner that calls it has it."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "_update" and "step" in frame.f_locals:
            return int(frame.f_locals["step"])
        frame = frame.f_back
    raise LookupError("the learner's step is not found; has `Learner._update` changed?")
