"""Throughput of take, step, commit and publish with one rank and gRPC on loopback.

`python benchmarks/trainer_step.py [--json PATH] [--steps N] [--sequences N] [--profile PATH]`

The default is a model of a million parameters with random weights; `--model` takes another.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import multiprocessing.connection
import tempfile
import time
from collections.abc import AsyncIterator, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from grpc import aio
from rig.smoke import arguments as arguments_of

from paceline.config import JobSpec
from paceline.config.load import resolve_job
from paceline.platform.server.chassis import run_loop
from paceline.platform.transport.rpc import SERVER_OPTIONS, connect
from paceline.v1 import experience_pb2 as pb
from paceline.v1 import roster_pb2, types_pb2
from paceline.v1.experience_pb2_grpc import (
    ExperienceServicer,
    ExperienceStub,
    add_ExperienceServicer_to_server,
)
from paceline.v1.jobs_pb2_grpc import JobsServicer, JobsStub, add_JobsServicer_to_server
from paceline.v1.roster_pb2_grpc import RosterServicer, RosterStub, add_RosterServicer_to_server

WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch of random tokens."""

    sequences: int = 512
    vocab: int = 32
    prompt: int = 7
    answer: int = 4
    group: int = 8


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence of a batch."""

    prompt: list[int]
    answer: list[int]
    logprobs: list[float]  # of the answer
    advantage: float


def batch(shape: Shape) -> list[Sequence]:
    """The same batch in every process; sequences of a group follow each other."""
    chance = np.random.default_rng(0)
    groups = -(-shape.sequences // shape.group)
    prompts = chance.integers(0, shape.vocab, (groups, shape.prompt))
    return [
        Sequence(
            prompts[i // shape.group].tolist(),
            chance.integers(0, shape.vocab, shape.answer).tolist(),
            (-3 * chance.random(shape.answer)).tolist(),
            float(chance.normal()),
        )
        for i in range(shape.sequences)
    ]


class Source(ExperienceServicer, RosterServicer, JobsServicer):
    """A fake ledger that always has a batch."""

    def __init__(self, *, steps: int, shape: Shape) -> None:
        self._steps = steps
        self._step = 0
        self._versions: dict[int, int] = {}  # by step
        self._total = shape.sequences
        self._tokens = shape.sequences * shape.answer
        self._samples = [sample(i, each, shape.group) for i, each in enumerate(batch(shape))]
        self.commits: list[tuple[float, dict[str, Any]]] = []

    async def GetJob(self, request: Any, context: Any) -> types_pb2.Job:
        """The job succeeds with the last step."""
        done = self._step >= self._steps
        state = types_pb2.JOB_STATE_SUCCEEDED if done else types_pb2.JOB_STATE_RUNNING
        return types_pb2.Job(status=types_pb2.JobStatus(job_id="j", state=state))

    async def ListCheckpoints(self, request: Any, context: Any) -> pb.ListCheckpointsReply:
        """There are none."""
        return pb.ListCheckpointsReply()

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
            total_tokens=self._tokens,
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


def sample(index: int, sequence: Sequence, group: int) -> pb.TrainSample:
    """A sequence as the ledger sends it."""
    start = len(sequence.prompt)
    end = start + len(sequence.answer)
    return pb.TrainSample(
        group_id=f"g{index // group}",
        index=index % group,
        row=index,
        tokens=[*sequence.prompt, *sequence.answer],
        spans=[
            types_pb2.TokenSpan(start=0, end=start, source=types_pb2.TOKEN_SOURCE_TEMPLATE),
            types_pb2.TokenSpan(start=start, end=end, source=types_pb2.TOKEN_SOURCE_POLICY),
        ],
        logprobs=sequence.logprobs,
        versions=[types_pb2.VersionRun(version=0, count=end - start)],
        advantages=[sequence.advantage],
        temperature=1.0,
        weight=1.0,
    )


def serve(pipe: multiprocessing.connection.Connection, steps: int, shape: Shape) -> None:
    """Entry point of the ledger's process."""
    asyncio.run(_serve(pipe, steps, shape))


async def _serve(pipe: multiprocessing.connection.Connection, steps: int, shape: Shape) -> None:
    source = Source(steps=steps, shape=shape)  # pyright: ignore[reportAbstractUsage]
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


def make_model(path: Path, vocab: int) -> None:
    """Write a model with about a million parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=128,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(path)


async def train(
    spec: JobSpec, port: int, folder: Path, *, threads: int, profile: Path | None
) -> None:
    """Run the trainer's loop in this process."""
    import torch

    from paceline.methods.objective.load import load_objective
    from paceline.weights import HttpTransport, TransportSettings
    from paceline_trainer.checkpoints.checkpoint import Checkpoints
    from paceline_trainer.client import TrainerLedger
    from paceline_trainer.phase_clock import PhaseClock
    from paceline_trainer.ranks.distributed import RankGroup
    from paceline_trainer.ranks.rank_info import RankInfo
    from paceline_trainer.step.learner import Learner
    from paceline_trainer.step.loading import load_policy
    from paceline_trainer.step.mismatch.comparison import mismatch_of
    from paceline_trainer.step.model import shard
    from paceline_trainer.step.optimizer import Optimizer
    from paceline_trainer.trainer import Trainer, TrainingBackend
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
    compute = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,))
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
    weights = HttpTransport(TransportSettings(host="127.0.0.1"))
    endpoint = await weights.start()
    snapshotter = Snapshotter(
        policy, group, engine_dtype=spec.model.dtype, dtype=spec.trainer.dtype
    )
    checkpoints = Checkpoints(folder / "checkpoints", group=group, keep=2)
    trainer = Trainer(
        engine=TrainingBackend(
            policy, optimizer, learner, checkpoints, snapshotter, mismatch, group
        ),
        ledger=ledger,
        publisher=Publisher(ledger=ledger, transport=weights, endpoint=endpoint, incarnation=1),
        compute=WorkThread(compute),
        spec=spec.trainer,
        clock=PhaseClock(),
    )
    with nullcontext() if profile is None else profiled(compute, profile):
        await trainer.run()
    await weights.close()
    await channel.close()
    group.close()


@contextmanager
def profiled(compute: ThreadPoolExecutor, path: Path) -> Generator[None]:
    """Write what a thread spends its time on; a profiler sees the thread that has started it."""
    from torch.profiler import ProfilerActivity, profile

    seen = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    compute.submit(seen.start).result()
    yield
    compute.submit(seen.stop).result()
    averages = seen.key_averages(group_by_input_shape=True)
    path.write_text(averages.table(sort_by="self_cpu_time_total", row_limit=60))


def report(commits: list[tuple[float, dict[str, Any]]], shape: Shape) -> dict[str, Any]:
    """Statistics of the steps after the warm-up."""
    measured = commits[WARM_UP:]
    seconds = (commits[-1][0] - commits[WARM_UP - 1][0]) / len(measured)
    names = ("step_s", "wait_s", "publish_s", "checkpoint_s")
    phases = {n: sum(m[n] for _, m in measured) / len(measured) for n in names}
    return {
        "samples_per_s": shape.sequences / seconds,
        "tokens_per_s": shape.sequences * (shape.prompt + shape.answer) / seconds,
        "s_per_step": seconds,
        "steps": len(measured),
        **asdict(shape),
        **phases,
    }


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    for field in fields(Shape):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--profile", type=Path)
    given = arguments_of(parser, steps=1, sequences=16)
    shape = Shape(**{field.name: getattr(given, field.name) for field in fields(Shape)})
    here, there = multiprocessing.Pipe()
    arguments = (there, given.steps + WARM_UP, shape)
    # Before this process has threads.
    child = multiprocessing.get_context("fork").Process(target=serve, args=arguments, daemon=True)
    child.start()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.model is None:
            make_model(folder / "model", shape.vocab)
        spec = resolve_job(
            {
                "name": "bench",
                "model": {"path": str(given.model or folder / "model")},
                "tasks": {"environment": "arithmetic"},
                "reward": [{"kind": "exact"}],
                "trainer": {"tokens_per_micro_batch": given.budget},
            }
        )
        port = here.recv()
        run_loop(train(spec, port, folder, threads=given.threads, profile=given.profile))
    here.send("end")
    figures = report(here.recv(), shape)
    child.join()
    print(json.dumps(figures, indent=2))
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
