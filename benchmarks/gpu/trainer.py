"""Optimiser steps of random models on one GPU: tokens/s, model FLOPs utilisation, memory, stages.

`python benchmarks/gpu/trainer.py [--models 0.5b 1.5b 3b] [--json PATH] [--profile FOLDER]`

Models have the shapes of Qwen2.5 and random weights, written to a temporary folder in bfloat16 and
loaded as the trainer loads them. A batch is groups of samples of one prompt, with answers of
lognormal length. Copies of the weights (as for a publication) and of the state (as for a
checkpoint) are timed too. MFU counts 6 FLOPs per parameter and distinct token that is fed, and the
attention, against the rate of a large matrix product on the same card and against its datasheet.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.v1 import experience_pb2 as pb
from paceline.v1 import types_pb2

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rig.smoke import arguments

WARM_UP = 2
DATASHEET_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "B200": 2250.0}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model and its batch look like."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    vocab: int = 151_936
    groups: int = 32
    group: int = 8
    prompt: int = 512
    answer: int = 512  # median
    tied: bool = True


SHAPES = {
    "tiny": Shape(2, 64, 128, 4, 2, vocab=512, groups=4, group=4, prompt=12, answer=8),
    "0.5b": Shape(24, 896, 4864, 14, 2),
    "1.5b": Shape(28, 1536, 8960, 12, 2, groups=16),
    "3b": Shape(36, 2048, 11008, 16, 2, groups=8),
    "7b": Shape(28, 3584, 18944, 28, 4, vocab=152_064, tied=False, groups=8),
}


def samples(shape: Shape) -> list[pb.TrainSample]:
    """Groups of one prompt; lengths of answers are lognormal, at most four times the median."""
    chance = np.random.default_rng(0)
    found: list[pb.TrainSample] = []
    prompt: list[int] = []
    for index in range(shape.groups * shape.group):
        if index % shape.group == 0:
            prompt = chance.integers(0, shape.vocab, shape.prompt).tolist()
        size = int(np.clip(shape.answer * np.exp(0.5 * chance.normal()), 2, 4 * shape.answer))
        start, end = shape.prompt, shape.prompt + size
        found.append(
            pb.TrainSample(
                group_id=f"g{index // shape.group}",
                index=index % shape.group,
                row=index,
                tokens=[*prompt, *chance.integers(0, shape.vocab, size).tolist()],
                spans=[
                    types_pb2.TokenSpan(start=0, end=start, source=types_pb2.TOKEN_SOURCE_TEMPLATE),
                    types_pb2.TokenSpan(start=start, end=end, source=types_pb2.TOKEN_SOURCE_POLICY),
                ],
                logprobs=(-np.log(shape.vocab) + 0.1 * chance.normal(size=size)).tolist(),
                versions=[types_pb2.VersionRun(version=0, count=size)],
                advantages=[float(chance.normal())],
                temperature=1.0,
                weight=1.0,
            )
        )
    return found


def make_model(shape: Shape, folder: Path, device: str) -> None:
    """Write a model with random weights in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        max_position_embeddings=32_768,
        tie_word_embeddings=shape.tied,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


class Stages:
    """Seconds by stage, with the device idle before and after each."""

    def __init__(self, device: Any) -> None:
        self.seconds = defaultdict[str, float](float)
        self._device = device

    @contextmanager
    def __call__(self, name: str) -> Generator[None]:
        """Time what is inside."""
        synchronize(self._device)
        started = time.perf_counter()
        try:
            yield
        finally:
            synchronize(self._device)
            self.seconds[name] += time.perf_counter() - started


def synchronize(device: Any) -> None:
    """Wait for what has been launched."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def ceiling_tflops(device: Any) -> float:
    """The rate of a large product of random bfloat16 matrices."""
    import torch

    if device.type != "cuda":
        return 0.0
    one, two = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        torch.matmul(one, two)
    synchronize(device)
    started = time.perf_counter()
    for _ in range(10):
        torch.matmul(one, two)
    synchronize(device)
    return 10 * 2 * 8192**3 / (time.perf_counter() - started) / 1e12


@dataclass(frozen=True, slots=True)
class Parts:
    """What trains one model."""

    policy: Any
    optimizer: Any
    learner: Any
    group: Any


def build(shape: Shape, given: argparse.Namespace, group: Any) -> tuple[Parts, float]:
    """The parts of a trainer, and the seconds that loading the model took."""
    from paceline.config.load import resolve_job
    from paceline.config.sections.lora import LoraSpec
    from paceline.methods.objective.load import load_objective
    from paceline_trainer.step.learner import Learner
    from paceline_trainer.step.loading import open_policy
    from paceline_trainer.step.model import shard
    from paceline_trainer.step.optimizer import Optimizer

    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        make_model(shape, Path(folder), group.device.type)
        spec = resolve_job(
            {
                "name": "bench",
                "model": {"path": folder, "dtype": given.dtype},
                "tasks": {"environment": "arithmetic"},
                "reward": [{"kind": "exact"}],
                "trainer": {"tokens_per_micro_batch": given.budget, "dtype": given.dtype},
            }
        )
        started = time.perf_counter()
        lora = LoraSpec(rank=given.lora) if given.lora else None
        policy = open_policy(folder, gradient_checkpointing=given.checkpointing, lora=lora)
        shard(policy, group, dtype=given.dtype)
        synchronize(group.device)
        load_s = time.perf_counter() - started
    if given.layout:
        policy.layouts = (given.layout,)
    optimizer = Optimizer(policy, spec.trainer.optimizer, total_steps=100)
    objective = load_objective(spec.trainer.objective)
    learner = Learner(
        policy=policy, optimizer=optimizer, objective=objective, group=group, budget=given.budget
    )
    return Parts(policy, optimizer, learner, group), load_s


def share(batch: list[pb.TrainSample], step: int) -> Any:
    """A batch as the learner takes it."""
    from paceline_trainer.columns import Share

    return Share("b", step, len(batch), sum(len(each.logprobs) for each in batch), tuple(batch))


def measure(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """One model."""
    import torch

    from paceline_trainer.ranks.distributed import RankGroup
    from paceline_trainer.ranks.rank_info import RankInfo

    shape, group = SHAPES[name], RankGroup(RankInfo())
    figures: dict[str, Any] = {"model": name, **asdict(shape)}
    figures["ceiling_tflops"] = ceiling_tflops(group.device)
    parts, figures["load_s"] = build(shape, given, group)
    batch = samples(shape)
    if group.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    metrics: dict[str, float] = {}
    for step in range(WARM_UP + given.steps):
        synchronize(group.device)
        started = time.perf_counter()
        metrics = parts.learner.step(share(batch, step))
        synchronize(group.device)
        times.append(time.perf_counter() - started)
        print(f"{name}: step {step}: {times[-1]:.2f} s", file=sys.stderr, flush=True)
    stages = Stages(group.device)
    parts.learner.step(share(batch, 50), stages)
    seconds = statistics.median(times[WARM_UP:])
    figures |= rates(shape, given, parts, batch, metrics["fed_tokens"], seconds)
    figures |= {"step_s": seconds, "step_s_all": times, "stages_s": dict(stages.seconds)}
    figures |= {"budget": given.budget, "gradient_checkpointing": given.checkpointing}
    figures |= {"lora_rank": given.lora, "grad_norm": metrics["grad_norm"], "dtype": given.dtype}
    if group.device.type == "cuda":
        figures |= of_card(figures)
    if given.profile is not None:
        path = given.profile / f"{name}-{figures['layout']}.txt"
        profiled(parts.learner, share(batch[: 4 * shape.group], 60), path)
    print(json.dumps(figures), file=sys.stderr, flush=True)
    if given.copies:
        figures["copies"] = copies(given, parts)
    group.close()
    return figures


def rates(
    shape: Shape,
    given: argparse.Namespace,
    parts: Parts,
    batch: list[pb.TrainSample],
    fed: float,
    seconds: float,
) -> dict[str, Any]:
    """Tokens and floating point operations per second; `fed`: distinct tokens of a step."""
    from paceline_trainer.columns import columns

    data = columns(batch)
    layout = parts.learner.scorer.parts(data, [np.arange(data.num_sequences)])[0].layout
    # The head sees only positions before policy tokens, the rows of the embedding are looked up.
    head = shape.vocab * shape.hidden
    body = parts.policy.num_parameters - (head if shape.tied else 2 * head)
    # Frozen weights need no gradient of their own: 4 operations instead of 6.
    flops = (4 if given.lora else 6) * (body * fed + head * data.num_tokens)
    # Attention of causal sequences: half of 4 operations per pair and hidden unit, three times.
    pairs = sum(len(each.tokens) ** 2 for each in batch) / 2
    flops += 3 * 4 * pairs * shape.hidden * shape.layers
    tokens = sum(len(each.tokens) for each in batch)
    return {
        "parameters": parts.policy.num_parameters,
        "layout": layout,
        "tokens": tokens,
        "fed_tokens": fed,
        "tokens_per_s": tokens / seconds,
        "fed_tokens_per_s": fed / seconds,
        "tflops": flops / seconds / 1e12,
    }


def of_card(figures: dict[str, Any]) -> dict[str, Any]:
    """Which card it was, its memory, and the share of its rates."""
    import torch

    card = torch.cuda.get_device_name()
    sheet = next((rate for key, rate in DATASHEET_TFLOPS.items() if key in card), 0.0)
    return {
        "card": card,
        "torch": torch.__version__,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "mfu_of_ceiling": figures["tflops"] / figures["ceiling_tflops"],
        "mfu_of_datasheet": figures["tflops"] / sheet if sheet else None,
    }


def copies(given: argparse.Namespace, parts: Parts) -> dict[str, float]:
    """Seconds of copies that training waits for, each the second time."""
    from paceline_trainer.checkpoints.checkpoint import Checkpoints
    from paceline_trainer.weights.publish import Snapshotter

    found: dict[str, float] = {}
    policy, group = parts.policy, parts.group
    snapshotter = Snapshotter(policy, group, engine_dtype=given.dtype, dtype=given.dtype)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        kept = Checkpoints(Path(folder), group=group, keep=1)
        for _ in range(2):
            synchronize(group.device)
            started = time.perf_counter()
            snapshot = snapshotter.begin(1)
            snapshotter.gather(snapshot)
            found["snapshot_s"] = time.perf_counter() - started
            found["snapshot_bytes"] = snapshot.num_bytes
            started = time.perf_counter()
            kept.stage(1, policy, parts.optimizer, {})
            found["checkpoint_stage_s"] = time.perf_counter() - started
            print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def profiled(learner: Any, share: Any, path: Path) -> None:
    """Write which kernels a step spends its time in."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        learner.step(share)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = seen.key_averages()
    table = rows.table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=90)
    path.write_text(table)


def _measure(pipe: Any, name: str, given: argparse.Namespace) -> None:
    try:
        pipe.send(measure(name, given))
    except BaseException as error:  # the boundary of one model
        traceback.print_exc()
        pipe.send({"model": name, "error": f"{type(error).__name__}: {error}"[:500]})


def main() -> None:
    """Measure each model in a process of its own, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=tuple(SHAPES), default=["0.5b", "1.5b"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--budget", type=int, default=16_384)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layout", choices=("padded", "tree"))
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0: all weights")
    parser.add_argument("--copies", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    given = arguments(parser, models=["tiny"], steps=1, budget=512, dtype="float32", copies=True)
    fork = multiprocessing.get_context("fork")  # this process never touches the device
    found: list[dict[str, Any]] = []
    for name in given.models:
        here, there = fork.Pipe()
        child = fork.Process(target=_measure, args=(there, name, given))
        child.start()
        there.close()
        try:
            found.append(here.recv())
        except EOFError:
            found.append({"model": name, "error": "its process has ended"})
        child.join()
        print(json.dumps(found[-1]), flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps(found, indent=2))
    if failed := [each["model"] for each in found if "error" in each]:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
