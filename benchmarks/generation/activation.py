"""Cost of a new version for an engine: during its transfer, and during the swap.

`python benchmarks/generation/activation.py [--json PATH] [--rounds N] [--swaps N]`

One thread of the torch engine generates continuously. `transfer`: tokens per second while
SmolLM2-135M arrives from a server in another process at a capped rate, and while it is then
prepared and swapped in, each relative to the rate just before and after. `swap`: the pause in
tokens beyond the usual step when the version changes, by activation policy, and the part of it in
which the engine exchanges weights.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import platform
import random
import statistics
import sys
import threading
import time
from collections.abc import AsyncGenerator, Generator, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import uvloop
from safetensors.torch import load_file

from paceline.plugins import EngineOutput, EngineRequest
from paceline.types import SamplingParams
from paceline.weights import SnapshotHeader, Staging, WeightServer, choose_chunk_bytes, plan, pull
from paceline_rollout.activation import Activation
from paceline_rollout.engines.torch.engine import TorchEngine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rig.smoke import arguments

SMOLLM2, DEMO = Path("models/smollm2-135m-instruct"), Path("models/arithmetic")
MISSING = "a model is missing; `make demo` and `make demo-smollm2` create them"
JOB = "bench"
LINKS = (200e6, 1e9)  # bit/s
DEMO_STEP_S = 0.28
RATES = ("tokens_per_s", "tokens_per_s_not_waiting", "tokens_per_processor_s")


@dataclass(frozen=True, slots=True)
class Case:
    """A model and the requests that keep its engine busy."""

    model: Path
    dtype: str
    rows: int
    prompt: int
    new: tuple[int, int]
    vocab: int
    settle_s: float = 5.0


CASES = {
    "demo": Case(DEMO, "float32", rows=256, prompt=6, new=(8, 40), vocab=16),
    "smollm2": Case(SMOLLM2, "bfloat16", rows=16, prompt=32, new=(32, 224), vocab=49000),
}


def smoke_cases(model: Path) -> dict[str, Case]:
    """The larger case with a small model."""
    return {"smollm2": Case(model, "float32", 4, 8, (8, 16), vocab=18, settle_s=0.2)}


class Busy:
    """Keeps an engine supplied with as many requests as it has rows."""

    def __init__(self, engine: TorchEngine, case: Case) -> None:
        self.engine = engine
        self.marks: list[tuple[float, int, int]] = []  # when, version, tokens
        self._case = case
        self._chance = random.Random(0)
        self._asked = 0

    async def run(self) -> None:
        """Generate until cancelled."""
        self.engine.submit([self._request() for _ in range(self._case.rows)])
        async for batch in self.engine.emissions():
            self._note(batch)
            ended = sum(bool(one.finish_reason) for one in batch)
            if ended:
                self.engine.submit([self._request() for _ in range(ended)])

    def _note(self, batch: list[EngineOutput]) -> None:
        now = time.perf_counter()
        failed = [one.error for one in batch if one.error]
        if failed:
            raise RuntimeError(failed[0])
        counts: dict[int, int] = {}
        for run in (run for one in batch for run in one.versions):
            counts[run.version] = counts.get(run.version, 0) + run.count
        self.marks.extend((now, version, count) for version, count in sorted(counts.items()))

    def _request(self) -> EngineRequest:
        self._asked += 1
        tokens = [self._chance.randrange(3, self._case.vocab) for _ in range(self._case.prompt)]
        new = self._chance.randint(*self._case.new)
        sampling = SamplingParams(max_tokens=new, seed=self._asked)
        return EngineRequest(str(self._asked), tuple(tokens), sampling)


@contextlib.asynccontextmanager
async def busy(case: Case, first: Any, **options: Any) -> AsyncGenerator[Busy]:
    """A warmed-up engine under load."""
    engine = TorchEngine(
        model_dir=case.model,
        dtype=case.dtype,
        max_context=case.prompt + case.new[1] + 1,
        max_concurrent=case.rows,
        threads=1,
        tokenizer_dir=None,
        job_id=JOB,
        **options,
    )
    await engine.start()
    await engine.load(first, "in_flight")
    load = Busy(engine, case)
    task = asyncio.create_task(load.run())
    await asyncio.sleep(case.settle_s)
    try:
        yield load
    finally:
        task.cancel()
        await asyncio.wait({task})
        await engine.close()


class Again:
    """A snapshot under another version number."""

    def __init__(self, staging: Staging, version: int) -> None:
        self.header = replace(staging.header, version=version)
        self._staging = staging

    def tensors(self) -> Iterator[Any]:
        """Tensors of the snapshot."""
        return self._staging.tensors()


def staged(case: Case, version: int = 0) -> Staging:
    """The model's weights as a trainer would publish them."""
    named = load_file(case.model / "model.safetensors")
    entries, size = plan([(n, case.dtype, tuple(t.shape)) for n, t in named.items()])
    chunk = choose_chunk_bytes(size)
    staging = Staging(
        SnapshotHeader(JOB, version, version, version - 1, -1, 1, size, chunk, entries)
    )
    for entry in entries:
        value = named[entry.name].to(getattr(torch, case.dtype)).contiguous()
        staging.fill(entry.offset, value.view(torch.uint8).numpy().tobytes())
    staging.finish()
    return staging


# the other process ---------------------------------------------------------------------------


def serve(pipe: Connection, case: Case, bits_per_s: float) -> None:
    """Serve each requested version at a capped rate."""
    uvloop.run(_serve(pipe, case, bits_per_s))


async def _serve(pipe: Connection, case: Case, bits_per_s: float) -> None:
    server = WeightServer(host="127.0.0.1", bytes_per_s=bits_per_s / 8)
    pipe.send(await server.start())
    first = staged(case)
    while (version := await asyncio.to_thread(pipe.recv)) >= 0:
        staging = Staging(replace(first.header, version=version))
        staging.fill(0, first.buffer())
        staging.finish()
        server.offer(staging)
        pipe.send(version)
    await server.close()


@contextlib.contextmanager
def sender(case: Case, bits_per_s: float) -> Generator[tuple[Connection, str]]:
    """Start a serving process; yields its pipe and endpoint."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, case, bits_per_s))
    process.start()
    try:
        yield mine, mine.recv()
    finally:
        mine.send(-1)
        process.join(20)
        process.kill()


# measuring -----------------------------------------------------------------------------------


class Meter:
    """Tokens per second of wall time, per second not spent waiting for a CPU, and per CPU second.

    The last two are meaningful on a machine that is shared with other work.
    """

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        thread = next(one for one in threading.enumerate() if one.name == "engine")
        self._times = Path(f"/proc/self/task/{thread.native_id}/schedstat")
        self._last = self._now()

    def _now(self) -> tuple[int, float, float, float]:
        ran, waited, _ = (int(part) / 1e9 for part in self._times.read_text().split())
        return self._engine.status().tokens_generated, time.perf_counter(), waited, ran

    def read(self) -> dict[str, float | None]:
        """Rates since the last call; None where the engine's thread did not run in between."""
        last, self._last = self._last, self._now()
        tokens, seconds, waited_s, ran_s = (b - a for a, b in zip(last, self._last, strict=True))
        return {
            "seconds": seconds,
            "tokens_per_s": rate(tokens, seconds),
            "tokens_per_s_not_waiting": rate(tokens, seconds - waited_s),
            "tokens_per_processor_s": rate(tokens, ran_s),
        }


def rate(tokens: float, seconds: float) -> float | None:
    """Tokens per second; None over no time."""
    return tokens / seconds if seconds > 0 else None


async def transfers(case: Case, bits_per_s: float, rounds: int) -> dict[str, Any]:
    """Rates before and during transfers, and during swaps."""
    first = staged(case)
    rows: list[dict[str, Any]] = []
    with sender(case, bits_per_s) as (pipe, endpoint):
        server = WeightServer(host="127.0.0.1")
        await server.start()
        async with busy(case, first) as load:
            for version in range(1, rounds + 1):
                pipe.send(version)
                await asyncio.to_thread(pipe.recv)
                rows.append(await transfer(load, server, endpoint, version, case.settle_s))
                print(bits_per_s, rows[-1], flush=True)
        await server.close()
    return {
        "bits_per_s": bits_per_s,
        "bytes": first.header.num_bytes,
        "during_over_before": {key: shares(rows, "during", key) for key in RATES},
        "loading_over_before": {key: shares(rows, "loading", key) for key in RATES},
        "rounds": rows,
    }


def shares(rows: list[dict[str, Any]], part: str, key: str) -> float | None:
    """Median over the rounds of a rate, relative to the mean just before and after.

    Rounds without a rate are left out; None if all are.
    """
    known = [
        row[part][key] / statistics.mean(around)
        for row in rows
        if row[part][key] is not None
        and all(around := [row[name][key] or 0.0 for name in ("before", "after")])
    ]
    return statistics.median(known) if known else None


async def transfer(
    load: Busy, server: WeightServer, endpoint: str, version: int, settle_s: float
) -> dict[str, Any]:
    """Rates for one version: before, during transfer, until active, after."""
    meter = Meter(load.engine)
    await asyncio.sleep(settle_s)
    row: dict[str, Any] = {"before": meter.read()}
    staging = await pull([endpoint], job_id=JOB, version=version, stage=server.stage, timeout_s=120)
    row["during"] = meter.read()
    await load.engine.load(staging, "in_flight")
    row["loading"] = meter.read()
    await asyncio.sleep(settle_s)
    return {**row, "after": meter.read(), "load_average": os.getloadavg()}


async def swaps(name: str, case: Case, activation: Activation, num: int) -> dict[str, Any]:
    """Pause at each change of version, and the usual step."""
    first = staged(case)
    pauses, exchanged, waited = list[float](), list[float](), list[float]()
    async with busy(case, first, flush_s=0.0) as load:
        load.marks.clear()
        while not load.marks:
            await asyncio.sleep(0.05)
        for version in range(1, num + 1):
            swap_s, start_s = load.engine.status().swap_s, time.perf_counter()
            await load.engine.load(Again(first, version), activation.value)
            waited.append(time.perf_counter() - start_s)
            exchanged.append(load.engine.status().swap_s - swap_s)
            while load.marks[-1][1] < version:
                await asyncio.sleep(0.05)
        times = [when for when, _, _ in load.marks]
        usual = statistics.median(b - a for a, b in pairwise(times) if b > a)
        for version in range(1, num + 1):
            old = max(when for when, by, _ in load.marks if by == version - 1)
            new = min(when for when, by, _ in load.marks if by == version)
            pauses.append(new - old - usual)
    exchange_s = statistics.median(exchanged)
    return {
        "model": name,
        "activation": activation.value,
        "swaps": num,
        "usual_step_s": usual,
        "pause_s": statistics.median(pauses),
        "exchange_s": exchange_s,
        "exchange_over_demo_step": exchange_s / DEMO_STEP_S if name == "demo" else None,
        "load_to_active_s": statistics.median(waited),
        "load_average": os.getloadavg(),
    }


def machine() -> dict[str, Any]:
    """The machine, and its load at the start."""
    return {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": os.getloadavg(),
    }


def main() -> None:
    """Run the measurements and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of `transfer`; 0: skip")
    parser.add_argument("--swaps", type=int, default=15, help="swaps per model and policy; 0: skip")
    given = arguments(parser, rounds=1, swaps=2)
    cases = smoke_cases(given.smoke / "model") if given.smoke else CASES
    if not all((case.model / "config.json").exists() for case in cases.values()):
        print(f"skipped: {MISSING}")
        return
    found: dict[str, Any] = {"machine": machine(), "swap": [], "transfer": []}

    def write() -> None:
        if given.json is not None:
            given.json.parent.mkdir(parents=True, exist_ok=True)
            given.json.write_text(json.dumps(found, indent=1) + "\n")

    for name, case in cases.items() if given.swaps else ():
        for activation in Activation:
            found["swap"].append(uvloop.run(swaps(name, case, activation, given.swaps)))
            print(found["swap"][-1], flush=True)
            write()
    for bits_per_s in LINKS[-1:] if given.smoke else LINKS if given.rounds else ():
        found["transfer"].append(uvloop.run(transfers(cases["smollm2"], bits_per_s, given.rounds)))
        print(found["transfer"][-1], flush=True)
        write()


if __name__ == "__main__":
    main()
