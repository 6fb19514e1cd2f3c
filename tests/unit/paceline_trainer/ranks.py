"""One rank of a test that needs several, with the environment that torchrun would set."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.config.base import PluginSpec
from paceline.config.job import OptimizerSpec
from paceline.config.objective import ObjectiveSpec
from paceline.methods.objective.load import load_objective
from paceline.platform.transport.rpc import connect
from paceline.v1 import experience_pb2 as pb
from paceline.v1.experience_pb2_grpc import ExperienceStub
from paceline.v1.jobs_pb2_grpc import JobsStub
from paceline.v1.roster_pb2_grpc import RosterStub
from paceline.weights.transfer.http_transport import HttpTransport
from paceline.weights.transport import TransportSettings
from paceline_trainer.checkpoints.checkpoint import Checkpoints
from paceline_trainer.client import TrainerLedger
from paceline_trainer.columns import Share
from paceline_trainer.ranks.distributed import RankGroup
from paceline_trainer.ranks.rank_info import find_rank
from paceline_trainer.step.learner import Learner
from paceline_trainer.step.loading import load_policy, open_policy
from paceline_trainer.step.mismatch.comparison import Mismatch
from paceline_trainer.step.model import PolicyModel, shard
from paceline_trainer.step.optimizer import Optimizer
from paceline_trainer.step.versions import VersionSteps, WeightHistory
from paceline_trainer.weights.publish import Publisher, Snapshotter
from paceline_trainer.weights.seeder import WeightSeeder

M_MMAP_THRESHOLD = -3  # of malloc.h


def main(what: str, folder: Path) -> None:
    """Train a step under each objective in turn; write metrics and weights of each."""
    torch.set_num_threads(1)
    group = RankGroup(find_rank(os.environ))
    job: dict[str, Any] = json.loads((folder / "job.json").read_text())
    runs = [train(job, each, group) for each in job["objectives"]]
    if what == "save":
        _, policy, optimizer = runs[0]
        Checkpoints(folder / "checkpoints", group=group, keep=2).save(1, policy, optimizer)
    full = [[cast(DTensor, p).full_tensor() for p in policy.parameters()] for _, policy, _ in runs]
    if group.rank_info.first:
        (folder / "metrics.json").write_text(json.dumps([metrics for metrics, _, _ in runs]))
        flat = [torch.cat([p.detach().reshape(-1) for p in weights]) for weights in full]
        np.save(folder / "weights.npy", torch.stack(flat).numpy())
    group.close()


def train(
    job: dict[str, Any], options: dict[str, Any], group: RankGroup
) -> tuple[dict[str, float], PolicyModel, Optimizer]:
    """One step under one objective; `options` may have `hooks` too."""
    hooks = [PluginSpec(kind=each) for each in options.get("hooks", ())]
    own = {name: v for name, v in options.items() if name not in {"hooks", "mini_batches"}}
    policy = load_policy(job["path"])
    shard(policy, group, dtype="float32")
    optimizer = Optimizer(policy, OptimizerSpec(lr=1e-2, eps=1e-5), total_steps=10)
    plugin = ObjectiveSpec.model_validate(
        {"corrections": [{"kind": "behaviour_weight", "upper": None}]} | own
    )
    history = WeightHistory(policy, dtype="float32", max_versions=1, max_bytes=1 << 30)
    versions = VersionSteps(group)
    mismatch = Mismatch(
        group=group, history=history, versions=versions, num_sequences=100, budget=10_000
    )
    history.copy(0)
    first = group.rank_info.first
    mismatch.versions.published(job.get("version", 0) if first else -1, 0)
    learner = Learner(
        policy=policy,
        optimizer=optimizer,
        objective=load_objective(plugin, hooks),
        group=group,
        budget=60,
        mini_batches=options.get("mini_batches", 1),
        mismatch=mismatch,
    )
    samples = [pb.TrainSample.FromString(bytes.fromhex(text)) for text in job["samples"]]
    # An uneven split: the second rank has fewer micro-batches and idles along.
    mine = samples[: len(samples) - 5] if first else samples[len(samples) - 5 :]
    sequences, tokens = job["header"]
    return learner.step(Share("b", 0, sequences, tokens, tuple(mine))), policy, optimizer


def load(folder: Path) -> None:
    """Load the model as the trainer does and whole; write memory and the difference."""
    torch.set_num_threads(1)
    group = RankGroup(find_rank(os.environ))
    path = json.loads((folder / "job.json").read_text())["path"]
    # Freed tensors go back to the system, as those of large models do; the allocator keeps others.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 << 10)
    open_policy(path)  # what is imported and allocated at first use does not count
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is in use
    policy = open_policy(path)
    shard(policy, group, dtype="float32")
    peak = _memory("VmHWM") - before
    mine = sum(cast(DTensor, p).to_local().nbytes for p in policy.parameters())
    weights = [cast(DTensor, p).full_tensor() for p in policy.parameters()]
    ids = torch.arange(8)[None]
    scored = policy(ids, None, torch.arange(7), torch.arange(1, 8), 1.0).logprobs
    whole = load_policy(path)
    expected = whole(ids, None, torch.arange(7), torch.arange(1, 8), 1.0).logprobs
    found = {
        "peak": peak,
        "logprobs": (scored - expected).abs().max().item(),
        "weights": [torch.equal(a, b) for a, b in zip(weights, whole.parameters(), strict=True)],
        "shard": mine,
    }
    (folder / f"load-{group.rank_info.rank}.json").write_text(json.dumps(found))
    group.close()


class Gathers(TorchDispatchMode):
    """Counts the tensors that are gathered from all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func).startswith("_c10d_functional.all_gather_into_tensor")
        return func(*args, **(kwargs or {}))


def canary(folder: Path) -> None:
    """Make two canaries of a sharded policy; write their tokens and what was gathered for each."""
    torch.set_num_threads(1)
    group = RankGroup(find_rank(os.environ))
    policy = load_policy(json.loads((folder / "job.json").read_text())["path"])
    shard(policy, group, dtype="float32")
    snapshotter = Snapshotter(policy, group, engine_dtype="bfloat16", dtype="float32")
    found: dict[str, Any] = {"sharded": sum(isinstance(p, DTensor) for p in policy.parameters())}
    for name in ("first", "second"):
        with Gathers() as gathers:
            made = snapshotter.begin(0).canary
        found[name] = [each.tokens for each in made.sequences]
        found[f"gathered_{name}"] = gathers.count
    (folder / f"canary-{group.rank_info.rank}.json").write_text(json.dumps(found))
    group.close()


def _memory(field: str) -> int:
    """Bytes, from the status of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) << 10


async def seed(folder: Path) -> None:
    """Publish once as if each rank were a node of its own, and serve until told to end."""
    torch.set_num_threads(1)
    rank_info = find_rank(os.environ)
    rank_info = replace(rank_info, local_rank=0, node=rank_info.rank, nodes=rank_info.world)
    group = RankGroup(rank_info)
    job: dict[str, Any] = json.loads((folder / "job.json").read_text())
    policy = load_policy(job["path"])
    shard(policy, group, dtype="float32")
    snapshotter = Snapshotter(policy, group, engine_dtype=job["engine"], dtype="float32")
    server = HttpTransport(TransportSettings(host="127.0.0.1"))
    endpoint = await server.start()
    channel = connect(job["experience"])
    ledger = TrainerLedger(
        experience=ExperienceStub(channel),
        roster=RosterStub(channel),
        jobs=JobsStub(channel),
        job_id="j",
        incarnation=0,
    )
    publisher = (
        Publisher(ledger=ledger, transport=server, endpoint=endpoint, incarnation=0, parts=2)
        if rank_info.first
        else WeightSeeder(
            ledger=ledger, transport=server, endpoint=endpoint, part=rank_info.node, parts=2
        )
    )
    with ThreadPoolExecutor(1) as compute:
        loop = asyncio.get_running_loop()
        snapshot = await loop.run_in_executor(compute, snapshotter.begin, 0)
        publication = asyncio.create_task(publisher.publish(snapshot, parent=-1))
        await loop.run_in_executor(compute, snapshotter.gather, snapshot)
        await publication
        while not (folder / "end").exists():
            await asyncio.sleep(0.05)
        await loop.run_in_executor(compute, group.close)
    await server.close()
    await channel.close()


if __name__ == "__main__":
    if sys.argv[1] == "seed":
        asyncio.run(seed(Path(sys.argv[2])))
    elif sys.argv[1] == "load":
        load(Path(sys.argv[2]))
    elif sys.argv[1] == "canary":
        canary(Path(sys.argv[2]))
    else:
        main(sys.argv[1], Path(sys.argv[2]))
    sys.stderr.flush()
    os._exit(0)  # to take apart what was imported takes seconds
