"""A hook of the trainer that records its input: an independent record of each batch.

A sequence is identified by the log-probs that the engine reported for it; these pass through the
system unchanged and are also in exported trajectories.
"""

from __future__ import annotations

import os
import sys
import time
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from chaos.journal import Journal
from chaos.world import mood

from paceline.config import parse_arguments
from paceline.config.load import validate
from paceline.config.service import TrainerOptions
from paceline.methods.parts.slots import StepScale
from paceline.methods.parts.whole_batch import WholeBatch
from paceline.plugins import StrictModel


class RecordedOptions(StrictModel):
    """Options of `recorded`."""

    notes: str
    """Folder of the journal."""


def recorded(whole: WholeBatch, options: RecordedOptions) -> StepScale:
    """Record the batch of a step, which is one update; changes nothing."""
    if "WORLD_SIZE" in os.environ and int(os.environ["WORLD_SIZE"]) > 1:
        if mood(options.notes, "trainer") == f"hang rank {os.environ['RANK']}":
            time.sleep(3600)
        return StepScale(1.0)  # no rank has all of a batch
    tokens = whole.tokens
    owner, values = tokens.sequences.numpy(), tokens.behaviour.numpy()
    prints = [fingerprint(values[owner == index]) for index in range(tokens.num_sequences)]
    if len(prints) != tokens.scale.sequences:
        raise ValueError(f"{len(prints)} of {tokens.scale.sequences} sequences: not one rank")
    match mood(options.notes, "trainer"):
        case "raise":
            raise ZeroDivisionError("a hook with a bug")
        case "hang":
            time.sleep(3600)
        case _:
            pass
    record = _journal(options.notes)
    record.note("batch", step=tokens.step, prints=prints, **_process())
    return StepScale(1.0)


def fingerprint(logprobs: np.ndarray) -> str:
    """Digest of the log-probs of a sequence, as float32."""
    return blake2b(logprobs.astype(np.float32).tobytes(), digest_size=8).hexdigest()


@cache
def _journal(notes: str) -> Journal:
    return Journal(Path(notes), "trainer")


@cache
def _process() -> dict[str, Any]:
    """Job and incarnation of this process, by the settings that its command line names."""
    settings = parse_arguments(sys.argv[1:], program="paceline_trainer")
    options = validate(TrainerOptions, settings.options)
    return {"job": settings.job_id, "incarnation": options.incarnation}
