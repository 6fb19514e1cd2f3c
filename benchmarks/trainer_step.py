"""Throughput of take, step, commit and publish with one rank, one thread and gRPC on loopback.

`python benchmarks/trainer_step.py [--json PATH] [--steps N] [--sequences N] [--profile PATH]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import multiprocessing.connection
import tempfile
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from grpc import aio
from numpy.typing import NDArray

from paceline.config import JobSpec, parse_job
from paceline.server.chassis import run_loop
from paceline.transport.rpc import SERVER_OPTIONS, connect
from paceline.v1 import experience_pb2 as pb
from paceline.v1 import roster_pb2, types_pb2
from paceline.v1.experience_pb2_grpc import (
    ExperienceServicer,
    ExperienceStub,
    add_ExperienceServicer_to_server,
)
from paceline.v1.jobs_pb2_grpc import JobsServicer, JobsStub, add_JobsServicer_to_server
from paceline.v1.roster_pb2_grpc import RosterServicer, RosterStub, add_RosterServicer_to_server

VOCAB, PROMPT, ANSWER, GROUP = 32, 7, 4, 8
WARM_UP = 2


class Source(ExperienceServicer, RosterServicer, JobsServicer):
    """A fake ledger that always has a batch."""

    def __init__(self, *, steps: int, sequences: int) -> None:
        self._steps = steps
        self._step = 0
        self._versions: dict[int, int] = {}  # by step
        self._total = sequences
        chance = np.random.default_rng(0)
        prompts = chance.integers(0, VOCAB, (sequences // GROUP + 1, PROMPT))
        self._samples = [sample(chance, i, prompts[i // GROUP]) for i in range(sequences)]
        self.commits: list[tuple[float, dict[str, Any]]] = []

    async def GetJob(self, request: Any, context: Any) -> types_pb2.Job:
        """The job succeeds with the last step."""
        done = self._step >= self._steps
        state = types_pb2.JOB_STATE_SUCCEEDED if done else types_pb2.JOB_STATE_RUNNING
        return types_pb2.Job(status=types_pb2.JobStatus(job_id="j", state=state))

    async def Rewind(self, request: Any, context: Any) -> pb.RewindReply:
        """Nothing to rewind."""
        return pb.RewindReply(parent_version=-1)

    async def TakeBatch(self, request: Any, context: Any) -> AsyncIterator[pb.BatchPart]:
        """The same samples for every step."""
        if self._step >= self._steps:
            yield pb.BatchPart(stop=types_pb2.STOP_REASON_FINISHED)
            return
        yield pb.BatchPart(
            batch_id="b",
            step=request.step,
            total_sequences=self._total,
            total_tokens=self._total * ANSWER,
            num_samples=self._total,
        )
        for start in range(0, self._total, 256):
            yield pb.BatchPart(samples=self._samples[start : start + 256])

    async def CommitStep(self, request: Any, context: Any) -> pb.CommitStepReply:
        """Record the time."""
        self.commits.append((time.perf_counter(), dict(request.metrics)))
        self._step += 1
        return pb.CommitStepReply(step=self._step)

    async def CommitCheckpoint(self, request: Any, context: Any) -> pb.CommitCheckpointReply:
        """Accepted and ignored."""
        return pb.CommitCheckpointReply()

    async def PublishVersion(self, request: Any, context: Any) -> roster_pb2.PublishVersionReply:
        """The next version number, and the same again for a step that is announced again."""
        number = self._versions.setdefault(request.step, len(self._versions))
        version = types_pb2.PolicyVersion(version=number, step=request.step)
        return roster_pb2.PublishVersionReply(version=version)


def sample(chance: np.random.Generator, index: int, prompt: NDArray[np.int64]) -> pb.TrainSample:
    """The prompt of its group and a short response."""
    length = PROMPT + ANSWER
    return pb.TrainSample(
        group_id=f"g{index // GROUP}",
        index=index % GROUP,
        row=index,
        tokens=[*prompt.tolist(), *chance.integers(0, VOCAB, ANSWER).tolist()],
        spans=[
            types_pb2.TokenSpan(start=0, end=PROMPT, source=types_pb2.TOKEN_SOURCE_TEMPLATE),
            types_pb2.TokenSpan(start=PROMPT, end=length, source=types_pb2.TOKEN_SOURCE_POLICY),
        ],
        logprobs=(-3 * chance.random(ANSWER)).tolist(),
        versions=[types_pb2.VersionRun(version=0, count=ANSWER)],
        advantages=[float(chance.normal())],
        temperature=1.0,
        weight=1.0,
    )


def serve(pipe: multiprocessing.connection.Connection, steps: int, sequences: int) -> None:
    """Entry point of the ledger's process."""
    asyncio.run(_serve(pipe, steps, sequences))


async def _serve(pipe: multiprocessing.connection.Connection, steps: int, sequences: int) -> None:
    source = Source(steps=steps, sequences=sequences)  # pyright: ignore[reportAbstractUsage]
    server = aio.server(options=SERVER_OPTIONS)
    add_ExperienceServicer_to_server(source, server)
    add_RosterServicer_to_server(source, server)
    add_JobsServicer_to_server(source, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pipe.send(port)
    await asyncio.to_thread(pipe.recv)
    await server.stop(0)
    pipe.send(source.commits)


def make_model(path: Path) -> None:
    """Write a model with about a million parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(path)


async def train(spec: JobSpec, port: int, folder: Path) -> None:
    """Run the trainer's loop in this process."""
    import torch

    from paceline.objective.load import load_objective
    from paceline.weights import WeightServer
    from paceline_trainer.checkpoints.checkpoint import Checkpoints
    from paceline_trainer.client import TrainerLedger
    from paceline_trainer.ranks.distributed import RankGroup
    from paceline_trainer.ranks.rank_info import RankInfo
    from paceline_trainer.step.learner import Learner
    from paceline_trainer.step.loading import load_policy
    from paceline_trainer.step.mismatch import mismatch_of
    from paceline_trainer.step.model import shard
    from paceline_trainer.step.optimizer import Optimizer
    from paceline_trainer.trainer import PhaseClock, Trainer, TrainingBackend
    from paceline_trainer.weights.publish import Publisher, Snapshotter
    from paceline_trainer.work_thread import WorkThread

    channel = connect(f"127.0.0.1:{port}")
    ledger = TrainerLedger(
        experience=ExperienceStub(channel),
        roster=RosterStub(channel),
        jobs=JobsStub(channel),
        job_id="j",
        incarnation=1,
    )
    compute = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))
    group = RankGroup(RankInfo())
    policy = load_policy(spec.model.path)
    shard(policy, group, dtype=spec.trainer.dtype)
    optimizer = Optimizer(policy, spec.trainer.optimizer, total_steps=spec.stop.steps)
    mismatch = mismatch_of(spec, policy, group)
    learner = Learner(
        policy=policy,
        optimizer=optimizer,
        objective=load_objective(spec.trainer.objective),
        group=group,
        budget=spec.trainer.tokens_per_micro_batch,
        mismatch=mismatch,
    )
    server = WeightServer(host="127.0.0.1")
    endpoint = await server.start()
    snapshotter = Snapshotter(
        policy, group, engine_dtype=spec.model.dtype, dtype=spec.trainer.dtype
    )
    checkpoints = Checkpoints(folder / "checkpoints", group=group, keep=2)
    trainer = Trainer(
        engine=TrainingBackend(
            policy, optimizer, learner, checkpoints, snapshotter, mismatch, group
        ),
        ledger=ledger,
        publisher=Publisher(ledger=ledger, server=server, endpoint=endpoint, incarnation=1),
        compute=WorkThread(compute),
        spec=spec.trainer,
        clock=PhaseClock(),
    )
    await trainer.run()
    await server.close()
    await channel.close()
    group.close()


def report(commits: list[tuple[float, dict[str, Any]]], sequences: int) -> dict[str, Any]:
    """Statistics of the steps after the warm-up."""
    measured = commits[WARM_UP:]
    seconds = (commits[-1][0] - commits[WARM_UP - 1][0]) / len(measured)
    names = ("step_s", "wait_s", "publish_s", "checkpoint_s")
    phases = {n: sum(m[n] for _, m in measured) / len(measured) for n in names}
    return {
        "samples_per_s": sequences / seconds,
        "tokens_per_s": sequences * (PROMPT + ANSWER) / seconds,
        "s_per_step": seconds,
        "steps": len(measured),
        "sequences": sequences,
        **phases,
    }


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--profile", type=Path)
    given = parser.parse_args()
    here, there = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    arguments = (there, given.steps + WARM_UP, given.sequences)
    child = spawn.Process(target=serve, args=arguments, daemon=True)
    child.start()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        spec = parse_job(
            {
                "name": "bench",
                "model": {"path": str(folder / "model")},
                "tasks": {"environment": "arithmetic"},
                "reward": [{"kind": "exact"}],
                "trainer": {"tokens_per_micro_batch": given.budget},
            }
        )
        work = train(spec, here.recv(), folder)
        if given.profile is None:
            run_loop(work)
        else:
            from torch.profiler import ProfilerActivity, profile

            with profile(activities=[ProfilerActivity.CPU]) as seen:
                run_loop(work)
            table = seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=40)
            given.profile.write_text(table)
    here.send("end")
    figures = report(here.recv(), given.sequences)
    child.join()
    print(json.dumps(figures, indent=2))
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
