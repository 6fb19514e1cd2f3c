"""One rank of a test that needs several; started by torchrun."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from paceline.config.base import Plugin
from paceline.config.job import OptimizerSpec
from paceline.v1 import experience_pb2 as pb
from paceline_trainer.checkpoint import Checkpoints
from paceline_trainer.distributed import Group
from paceline_trainer.learner import Learner
from paceline_trainer.mismatch import Mismatch, Past
from paceline_trainer.model import load_policy, shard
from paceline_trainer.objectives.base import load_objective
from paceline_trainer.optimizer import Optimizer
from paceline_trainer.place import find_place
from paceline_trainer.take import Share


def main(what: str, folder: Path) -> None:
    torch.set_num_threads(1)
    place = find_place(os.environ)
    group = Group(place)
    job: dict[str, Any] = json.loads((folder / "job.json").read_text())
    policy = load_policy(job["path"])
    shard(policy, group, dtype="float32")
    optimizer = Optimizer(policy, OptimizerSpec(lr=1e-2), total_steps=10)
    plugin = Plugin.model_validate({"kind": "decoupled_ppo", "upper": None} | job["options"])
    past = Past(policy, dtype="float32", most_versions=1, most_bytes=1 << 30)
    mismatch = Mismatch(group=group, past=past, num_sequences=100, budget=10_000)
    past.keep(0)
    mismatch.published(job.get("version", 0) if place.first else -1, 0)
    learner = Learner(
        policy=policy,
        optimizer=optimizer,
        objective=load_objective(plugin),
        group=group,
        budget=60,
        mismatch=mismatch,
    )
    samples = [pb.TrainSample.FromString(bytes.fromhex(text)) for text in job["samples"]]
    # An uneven split: the second rank has fewer micro-batches and idles along.
    mine = samples[: len(samples) - 5] if place.first else samples[len(samples) - 5 :]
    sequences, tokens = job["header"]
    metrics = learner.step(Share("b", 0, sequences, tokens, tuple(mine), {}))
    if what == "save":
        checkpoints = Checkpoints(folder / "checkpoints", group=group, keep=2)
        checkpoints.save(1, policy, optimizer)
    full = [cast(DTensor, p).full_tensor() for p in policy.parameters()]
    if place.first:
        (folder / "metrics.json").write_text(json.dumps(metrics))
        np.save(folder / "weights.npy", torch.cat([p.detach().reshape(-1) for p in full]).numpy())
    group.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
