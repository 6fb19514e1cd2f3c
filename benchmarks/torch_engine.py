"""Speed of the embedded engine: `python benchmarks/torch_engine.py --json PATH`.

A Llama of about 1M parameters; prompts of 8 tokens shared by 8 requests, 4 new tokens each.
`matmul_ms` is the time of the model's matrix products alone: no engine can go below it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from paceline.interfaces import Generation
from paceline.types import Sampling
from paceline.weights import Header, Staging, plan
from paceline_rollout.engines.torch.engine import TorchEngine
from paceline_rollout.engines.torch.model import Policy
from paceline_rollout.engines.torch.scheduler import Scheduler

PROMPT, SHARED, NEW = 8, 8, 4


def make_config() -> Any:
    """About 1M parameters."""
    return LlamaConfig(
        vocab_size=32,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
    )


def random_snapshot(config: Any) -> Staging:
    """Weights as a trainer would publish them."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    named: dict[str, torch.Tensor] = dict(model.named_parameters())
    entries, num_bytes = plan([(n, "float32", tuple(p.shape)) for n, p in named.items()])
    staging = Staging(
        Header(
            job_id="bench",
            version=0,
            step=0,
            parent_version=-1,
            base_version=-1,
            incarnation=1,
            num_bytes=num_bytes,
            chunk_bytes=1 << 18,
            tensors=entries,
            tied=(),
            canary_tokens=(),
            canary_logprobs=(),
        )
    )
    for entry in entries:
        staging.fill(entry.offset, named[entry.name].detach().numpy().tobytes())
    staging.finish()
    return staging


def requests(count: int, first: int, max_tokens: int = NEW) -> list[Generation]:
    """Groups of SHARED requests with one prompt."""
    return [
        Generation(
            str(first + i),
            tuple((7 * (i // SHARED) + 3 * j) % 32 for j in range(PROMPT)),
            Sampling(max_tokens=max_tokens, seed=first + i),
        )
        for i in range(count)
    ]


def median_ms(work: Callable[[], object], rounds: int) -> float:
    """Median processor time of a call: others on this machine do not count."""
    times: list[float] = []
    for _ in range(rounds):
        started = time.thread_time()
        work()
        times.append(time.thread_time() - started)
    return sorted(times)[len(times) // 2] * 1e3


def matmul_ms(policy: Policy, rows: int) -> float:
    """The model's matrix products for so many rows."""
    shapes = [tuple(p.shape) for p in policy.parameters() if p.dim() == 2]
    pairs = [(torch.randn(rows, i), torch.randn(o, i)) for o, i in shapes[1:]]
    return median_ms(lambda: [torch.nn.functional.linear(x, w) for x, w in pairs], 15)


@torch.inference_mode()
def step_times(folder: Path, snapshot: Staging, rows: int) -> dict[str, float]:
    """One decode step of `rows` running requests, sampling included."""
    policy = Policy(model_dir=folder, dtype="float32", max_context=64, device="cpu")
    policy.load(snapshot)
    scheduler = Scheduler(
        policy=policy,
        max_context=64,
        max_concurrent=rows,
        prefill_tokens=1 << 20,
        cache_bytes=1 << 30,
        decode=None,
    )
    scheduler.gate.version = 0
    scheduler.add(requests(rows, 0, max_tokens=23))
    scheduler.tick()
    return {
        "decode_step_ms": round(median_ms(scheduler.tick, 15), 3),
        "matmul_ms": round(matmul_ms(policy, rows), 3),
    }


async def throughput(folder: Path, snapshot: Staging, rows: int) -> dict[str, float]:
    """Tokens a second with `rows` requests kept open, submitted in groups as others end."""
    engine = TorchEngine(
        model_dir=folder,
        dtype="float32",
        max_context=64,
        max_concurrent=rows,
        threads=1,
        tokenizer_dir=None,
        job_id="bench",
    )
    await engine.start()
    await engine.load(snapshot, "in_flight")
    total, submitted, ended, tokens = max(10 * rows, 400), 0, 0, 0
    started, cpu = time.perf_counter(), time.process_time()
    engine.submit(requests(rows, 0))
    submitted = rows
    async for batch in engine.emissions():
        tokens += sum(len(e.tokens) for e in batch)
        over = sum(1 for e in batch if e.finish_reason)
        ended += over
        if ended >= total:
            break
        engine.submit(requests(min(over, total - submitted), submitted))
        submitted += min(over, total - submitted)
    took = time.perf_counter() - started
    cpu = time.process_time() - cpu
    await engine.close()
    return {
        "tokens_per_s": round(tokens / took),
        "requests_per_s": round(ended / took),
        "cpu_ms_per_request": round(cpu / ended * 1e3, 3),
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config, found = make_config(), dict[str, dict[str, float]]()
    snapshot = random_snapshot(config)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config.save_pretrained(folder)
        for rows in (8, 64, 512):
            found[str(rows)] = {
                **step_times(folder, snapshot, rows),
                **asyncio.run(throughput(folder, snapshot, rows)),
            }
            print(rows, found[str(rows)])
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
