"""Tiny models, their snapshots, and an engine to run them."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from paceline.plugins import Engine, EngineOutput, EngineRequest
from paceline.types import SamplingParams
from paceline.weights import SnapshotHeader, Staging, plan
from paceline.weights.canary import Canary, CanarySequence
from paceline_harness.patience import PATIENCE_S
from paceline_rollout.engines.torch.engine import TorchEngine

VOCAB = 37

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "initializer_range": 0.1,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_COMMON),
    "qwen2": lambda: Qwen2Config(**_COMMON, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_COMMON, head_dim=16),
    "gpt2": lambda: GPT2Config(**_GPT2),
    "gemma2": lambda: Gemma2Config(**_COMMON, head_dim=8, sliding_window=128),
}
MakeModel = Callable[..., Any]
Snap = Callable[..., Staging]
OpenEngine = Callable[..., Any]


def make_model(kind: str = "llama", seed: int = 0) -> Any:
    """A random model that generates without an end token."""
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


def make_snapshot(model: Any, version: int = 0, canary: Sequence[int] = (1, 2, 3)) -> Staging:
    """The model's weights as a trainer would publish them."""
    saved = model.state_dict().keys()
    alone = [*model.named_parameters(), *model.named_buffers()]  # tied ones once
    named: dict[str, torch.Tensor] = {name: value for name, value in alone if name in saved}
    entries, num_bytes = plan([(n, "float32", tuple(p.shape)) for n, p in named.items()])
    with torch.no_grad():
        logits = model(torch.tensor([list(canary)])).logits[0, :-1]
        logp = torch.log_softmax(logits, -1).gather(1, torch.tensor(canary[1:]).unsqueeze(1))
    header = SnapshotHeader(
        job_id="job",
        version=version,
        step=version,
        parent_version=version - 1,
        base_version=-1,
        incarnation=1,
        num_bytes=num_bytes,
        chunk_bytes=1 << 16,
        tensors=entries,
        tied=(),
        canary=Canary((CanarySequence(tuple(canary), tuple(logp.squeeze(1).tolist())),)),
    )
    staging = Staging(header)
    for entry in entries:
        data = named[entry.name].detach().contiguous().numpy().tobytes()
        staging.fill(entry.offset, data)
    staging.finish()
    return staging


class Collector:
    """An engine's emissions, joined by request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.parts: dict[str, list[EngineOutput]] = defaultdict(list)
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._collect())

    async def _collect(self) -> None:
        async for batch in self.engine.emissions():
            for emission in batch:
                self.parts[emission.request_id].append(emission)
            self._news.set()

    def tokens(self, name: str) -> list[int]:
        """All tokens of a request."""
        return [t for e in self.parts[name] for t in e.tokens]

    def logprobs(self, name: str) -> list[float]:
        """Log-probs of all tokens of a request."""
        return [x for e in self.parts[name] for x in e.logprobs]

    def versions(self, name: str) -> list[int]:
        """The version of each token of a request."""
        runs = [run for e in self.parts[name] for run in e.versions]
        return [run.version for run in runs for _ in range(run.count)]

    def end(self, name: str) -> EngineOutput | None:
        """The last emission, if the request has ended."""
        found = self.parts[name]
        return found[-1] if found and found[-1].finish_reason else None

    async def until(self, done: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        """Wait until a condition holds."""
        async with asyncio.timeout(timeout_s):
            while not done():
                self._news.clear()
                await self._news.wait()

    async def finish(self, names: Iterable[str]) -> None:
        """Wait for requests to end."""
        wanted = list(names)
        await self.until(lambda: all(self.end(n) is not None for n in wanted))

    async def run(self, *requests: EngineRequest) -> None:
        """Submit requests and wait until they end."""
        self.engine.submit(requests)
        await self.finish(r.request_id for r in requests)


class Hold:
    """Pauses the compute thread of an engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._stopped, self._go = threading.Event(), threading.Event()

    @classmethod
    async def midway(cls, engine: Any, *requests: EngineRequest, rounds: int = 8) -> Hold:
        """Pause an engine `rounds` rounds after it has been given these requests."""
        idle, hold = cls(engine), cls(engine)
        await idle.after(0)
        engine.submit(requests)
        stopped = asyncio.ensure_future(hold.after(rounds))
        await asyncio.sleep(0)
        idle.release()
        await stopped
        return hold

    async def after(self, rounds: int) -> None:
        """Pause the engine `rounds` rounds from now; returns when it is paused."""
        self._order(rounds)
        assert await asyncio.to_thread(self._stopped.wait, PATIENCE_S)

    async def ordered(self, num: int) -> None:
        """Wait until `num` commands are queued."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self._engine._commands) < num:
                await asyncio.sleep(0.01)

    def release(self) -> None:
        """Let the engine continue."""
        self._go.set()

    def _order(self, rounds: int) -> None:
        self._engine._enqueue(partial(self._count, rounds))

    def _count(self, rounds: int) -> None:
        if rounds:
            self._order(rounds - 1)
            return
        self._stopped.set()
        self._go.wait(PATIENCE_S)


def ask(
    name: str, tokens: Sequence[int], pinned: int = -1, sampled: int = 0, **sampling: Any
) -> EngineRequest:
    """A request."""
    knobs: dict[str, Any] = {"max_tokens": 8, **sampling}
    return EngineRequest(name, tuple(tokens), SamplingParams(**knobs), pinned, sampled)


@pytest.fixture
def model_of() -> MakeModel:
    return make_model


@pytest.fixture
def snapshot_of() -> Snap:
    return make_snapshot


@pytest.fixture
def hold() -> type[Hold]:
    return Hold


@pytest.fixture
def request_of() -> Callable[..., EngineRequest]:
    return ask


@pytest.fixture
def open_torch(tmp_path: Path) -> OpenEngine:
    """An engine over a model, with its first version loaded, and a collector."""

    @asynccontextmanager
    async def opened(
        model: Any, *, load: bool = True, dtype: str = "float32", **options: Any
    ) -> AsyncGenerator[Collector]:
        model.config.save_pretrained(tmp_path)
        knobs: dict[str, Any] = {"max_context": 64, "max_concurrent": 64, **options}
        engine = TorchEngine(
            model_dir=tmp_path,
            dtype=dtype,
            threads=1,
            tokenizer_dir=tmp_path,
            job_id="job",
            **knobs,
        )
        await engine.start()
        if load:
            await engine.load(make_snapshot(model), "in_flight")
        try:
            yield Collector(engine)
        finally:
            await engine.close()

    return opened
