"""CPU time of an environment worker per single-turn episode, with fake peers in another process.

`python benchmarks/environment.py [--episodes N] [--burst] [--profile PATH] [--tokenizers WHERE]`

`child_cpu_ms_per_episode` is that of the process with the job's tokenizer, if it has one.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import multiprocessing.connection
import time
from pathlib import Path
from typing import Any

import psutil
from grpc import aio
from rig.smoke import arguments as arguments_of
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers

from paceline.config import ServiceSettings
from paceline.config.tokenizers import TokenizerSettings
from paceline.enums import Purpose, WorkerKind
from paceline.environments.arithmetic.tasks import ArithmeticTasks
from paceline.platform.server.chassis import Chassis, run_loop
from paceline.platform.telemetry.metrics import Metrics
from paceline.types import Assignment, Worker
from paceline_environment.service import build
from paceline_harness.peers import FakeExperience, FakeReward, FakeRollout

GROUP = 8
VOCAB = ["<pad>", "</s>", *"0123456789+=- "]
MODEL_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json")
SPEC = {
    "name": "bench",
    "model": {"path": "unused"},
    "tasks": {"environment": "arithmetic"},
    "sampling": {"max_tokens": 8, "max_context": 64, "on_truncation": "score"},
    "reward": [{"kind": "exact"}],
}


def files(model: Path | None) -> dict[str, bytes]:
    """Files of a model's tokenizer, or of a character tokenizer."""
    if model is not None:
        paths = [model / name for name in MODEL_FILES]
        return {path.name: path.read_bytes() for path in paths if path.is_file()}
    fast = FastTokenizer(models.WordLevel({t: i for i, t in enumerate(VOCAB)}, unk_token=" "))
    fast.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    config = {"eos_token": "</s>"}
    return {
        "tokenizer.json": fast.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


def assignments(num_groups: int) -> list[Assignment]:
    """Assignments of groups."""
    tasks = ArithmeticTasks(0)
    return [
        Assignment(
            job_id="job",
            group_id=f"g{i:06d}",
            indices=tuple(range(GROUP)),
            attempts=(1,) * GROUP,
            task=tasks[i % len(tasks)],
            purpose=Purpose.TRAIN,
            lease_s=10.0,
            seed=i,
        )
        for i in range(num_groups)
    ]


async def peers(
    num_groups: int, burst: bool, model: Path | None, pipe: multiprocessing.connection.Connection
) -> None:
    """Serve until every trajectory has arrived."""
    experience = FakeExperience(  # pyright: ignore[reportAbstractUsage]
        spec=json.dumps(SPEC), files=files(model)
    )
    experience.raw = []
    rollout = FakeRollout(speak=lambda seed, position: 1 if position % 4 == 3 else 5)
    rollout.pause_s, rollout.burst = 0.005, burst
    reward = FakeReward()
    for peer in (experience, rollout, reward):
        await peer.start()
    experience.workers = [
        Worker("rollout-0", WorkerKind.ROLLOUT, rollout.address, job_id="job", active_version=0),
        Worker("reward-0", WorkerKind.REWARD, reward.address),
    ]
    experience.give(assignments(num_groups))
    pipe.send(experience.address)
    while len(experience.raw) < num_groups * GROUP:
        await asyncio.sleep(0.02)
    tokens = sum(len(t.transcripts[0].logprobs) for t in experience.raw)
    pipe.send({"tokens": tokens, "submits": experience.num_submits, "scores": reward.num_calls})
    await asyncio.sleep(0.2)
    for peer in (experience, rollout, reward):
        await peer.stop()


def serve_peers(num_groups: int, burst: bool, model: Path | None, pipe: Any) -> None:
    """Entry point of the peers' process."""
    run_loop(peers(num_groups, burst, model, pipe))


def child_cpu_s(peers_pid: int) -> float:
    """CPU time of the processes below this one, without those of the peers."""
    found = [each for each in psutil.Process().children() if each.pid != peers_pid]
    below = [child for each in found for child in each.children(recursive=True)]
    return sum(sum(each.cpu_times()[:2]) for each in below)


async def work(
    address: str, pipe: Any, slots: int, tokenizers: str, peers_pid: int
) -> dict[str, float]:
    """Run the worker until the peers have all trajectories."""
    settings = ServiceSettings(
        kind=WorkerKind.ENVIRONMENT,
        worker_id="env-0",
        experience=address,
        options={"slots": slots},
        tokenizers=TokenizerSettings.model_validate({"run_in": tokenizers}),
    )
    server = aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    service = await build(Chassis(settings, server, Metrics(), f"127.0.0.1:{port}"))
    await server.start()
    started, cpu = time.perf_counter(), time.process_time()
    running = asyncio.create_task(service.run())
    while not pipe.poll():
        await asyncio.sleep(0.02)
    figures = {"wall_s": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}
    figures["child_cpu_s"] = child_cpu_s(peers_pid)
    running.cancel()
    await asyncio.wait({running})
    await service.close()
    await server.stop(None)
    return figures


def main() -> None:
    """Measure once and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=8000)
    parser.add_argument("--slots", type=int, default=1024)
    parser.add_argument(
        "--burst", action="store_true", help="stream each response as a single event"
    )
    parser.add_argument(
        "--tokenizers", choices=("process", "in_process"), default="in_process", help="where"
    )
    parser.add_argument("--model", type=Path, help="folder with a tokenizer to use")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--json", type=Path)
    options = arguments_of(parser, episodes=2 * GROUP)
    here, there = multiprocessing.Pipe()
    arguments = (options.episodes // GROUP, options.burst, options.model, there)
    other = multiprocessing.get_context("spawn").Process(target=serve_peers, args=arguments)
    other.start()
    profile = cProfile.Profile()
    if options.profile:
        profile.enable()
    address = here.recv()
    assert other.pid is not None
    figures = run_loop(work(address, here, options.slots, options.tokenizers, other.pid))
    if options.profile:
        profile.disable()
        profile.dump_stats(options.profile)
    figures.update(here.recv())
    other.join()
    figures["cpu_ms_per_episode"] = 1000 * figures["cpu_s"] / options.episodes
    figures["child_cpu_ms_per_episode"] = 1000 * figures["child_cpu_s"] / options.episodes
    figures["episodes_per_s"] = options.episodes / figures["wall_s"]
    text = json.dumps({key: round(value, 3) for key, value in figures.items()}, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
