"""A rollout worker on real gRPC for malformed requests, with each engine in `ENGINES`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from grpc import aio
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, LlamaConfig

from paceline.config import ServiceSettings
from paceline.enums import WorkerKind
from paceline.platform.server.chassis import Chassis
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.transport.rpc import SERVER_OPTIONS, ErrorInterceptor
from paceline.testing.engines import snapshot
from paceline.v1 import rollout_pb2 as pb
from paceline.v1 import roster_pb2, types_pb2
from paceline.weights import WeightServer
from paceline_harness.patience import PATIENCE_S
from paceline_harness.peers import FakeExperience
from paceline_rollout.service import RolloutService

T = TypeVar("T")
VOCAB, CONTEXT, ACTIVE = 32, 64, 3

# Kind of engine, its options, and the `settings` of its pool. An engine that cannot decode text
# needs no tokenizer here.
CPU: dict[str, Any] = {"device": "cpu", "cache_tokens": 8192}
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "torch": ("torch", {}),
    "simulated": (
        "simulated",
        {"vocab_size": VOCAB, "decode_tokens_per_s": 5000.0, "tick_s": 0.002},
    ),
    "fake-sglang": (
        "sglang",
        {"settings": {"python": sys.executable, "module": "paceline_harness.sglang"}},
    ),
    "sglang": ("sglang", CPU),
}
METHOD = "/paceline.v1.Rollout/Generate"
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
# Always gets the same answer.
GOOD = pb.GenerateRequest(
    request_id="good",
    tokens=(1, 2),
    sampling=types_pb2.SamplingParams(max_tokens=4, temperature=0.0, top_p=1.0, seed=5),
    pinned_version=-1,
    min_version=-1,
)


class Central(FakeExperience):
    """An experience service with one version to fetch."""

    source = ""

    async def WatchRoute(
        self, request: roster_pb2.WatchRouteRequest, context: object
    ) -> AsyncIterator[roster_pb2.Route]:
        version = types_pb2.PolicyVersion(version=ACTIVE, step=ACTIVE)
        yield roster_pb2.Route(
            version=version, sources=[roster_pb2.ChunkSource(endpoint=self.source)]
        )
        await asyncio.Event().wait()


@dataclass(slots=True)
class Outcome:
    """The status of a stream, and the last event of each request on it."""

    code: str
    text: str = ""
    events: list[pb.GenerateEvent] = field(default_factory=list[pb.GenerateEvent])

    @property
    def ends(self) -> list[pb.GenerateEvent]:
        return [event for event in self.events if event.finish_reason]

    def tokens(self, name: str) -> list[int]:
        return [t for e in self.events if e.request_id == name for t in e.tokens]


class Worker:
    """A rollout worker and its caller, whose event loop only runs during `run`."""

    def __init__(self, kind: str, options: dict[str, Any], folder: Path) -> None:
        self._runner = asyncio.Runner()
        self.faults: list[dict[str, Any]] = []
        self._runner.get_loop().set_exception_handler(lambda _, fault: self.faults.append(fault))
        self.run(self._start(kind, options, folder))
        self.good = GOOD
        self.right = self.answer()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    async def _start(self, kind: str, options: dict[str, Any], folder: Path) -> None:
        model, files = make_model(folder / "source")
        options = dict(options)
        engines = {kind: options.pop("settings", {})}
        spec = {
            "name": "job",
            "model": {"path": "unused"},
            "tasks": {"environment": "arithmetic"},
            "reward": [{"kind": "exact"}],
            "sampling": {"max_tokens": 8, "max_context": CONTEXT},
            "rollout": {"engine": {"kind": kind, **options}},
        }
        self._central = Central(spec=json.dumps(spec), files=files)  # pyright: ignore[reportAbstractUsage]
        self._weights = WeightServer(host="127.0.0.1")
        self._central.source = await self._weights.start()
        self._weights.offer(snapshot(model, ACTIVE, canary=()))
        await self._central.start()
        self._server = aio.server(
            interceptors=[ErrorInterceptor(metrics=Metrics())], options=SERVER_OPTIONS
        )
        address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        known = ServiceSettings(
            kind=WorkerKind.ROLLOUT,
            worker_id="r0",
            experience=self._central.address,
            job_id="job",
            run_dir=folder,
            options={"engines": engines},
        )
        self.service = RolloutService(
            Chassis(settings=known, server=self._server, metrics=Metrics(), address=address)
        )
        await self.service.start()
        await self._server.start()
        self._work = asyncio.create_task(self.service.run())
        self._channel = aio.insecure_channel(address, options=UNLIMITED)
        while self.service.report().active_version < ACTIVE:
            assert not self._work.done()
            await asyncio.sleep(0.02)

    async def _close(self) -> None:
        self._work.cancel()
        await asyncio.wait({self._work})
        await self._channel.close()
        await self.service.drain()
        await self._server.stop(0)
        await self.service.close()
        await self._central.stop()
        await self._weights.close()

    def close(self) -> None:
        self.run(self._close())
        self._runner.close()

    def send(self, *messages: bytes | float | str, timeout_s: float = PATIENCE_S) -> Outcome:
        """Send messages on one stream, half-close it, and return the outcome.

        A number is a pause in seconds; a string is a request whose end is awaited.
        """
        return self.run(self.exchange(*messages, timeout_s=timeout_s))

    def status(self, data: bytes) -> str:
        """The gRPC status of a `Status` call, with its details."""
        return self.run(self._status(data))

    async def _status(self, data: bytes) -> str:
        call: Any = self._channel.unary_unary("/paceline.v1.Rollout/Status")
        try:
            return (
                f"OK {pb.RolloutStatus.FromString(await call(data, timeout=PATIENCE_S)).worker_id}"
            )
        except aio.AioRpcError as error:
            return f"{error.code().name} {error.details()}"

    async def exchange(
        self, *messages: bytes | float | str, timeout_s: float = PATIENCE_S
    ) -> Outcome:
        """`send` as a coroutine."""

        async def requests() -> AsyncIterator[bytes]:
            for message in messages:
                if isinstance(message, bytes):
                    yield message
                elif isinstance(message, str):
                    while message not in {end.request_id for end in outcome.ends}:
                        await asyncio.sleep(0.01)
                else:
                    await asyncio.sleep(message)

        outcome = Outcome("OK")
        call: Any = self._channel.stream_stream(METHOD)(requests(), timeout=timeout_s)
        try:
            async for reply in call:
                outcome.events.extend(pb.GenerateEvents.FromString(reply).events)
        except aio.AioRpcError as error:
            outcome.code, outcome.text = error.code().name, error.details() or ""
        return outcome

    def answer(self) -> list[int]:
        """The answer to a valid request."""
        outcome = self.send(pb.GenerateBatch(requests=[GOOD]).SerializeToString())
        assert [end.finish_reason for end in outcome.ends] == [pb.FINISH_REASON_LENGTH], outcome
        return outcome.tokens("good")

    def is_well(self) -> None:
        """Assert that the worker is alive, holds no finished requests, and answers as before."""
        assert not self._work.done()
        assert self.answer() == self.right
        self.run(self._until_idle())
        assert not self.faults

    async def _until_idle(self) -> None:
        """Wait until the requests of disconnected callers have ended."""
        async with asyncio.timeout(PATIENCE_S):
            while any(self.service.report().load[name] for name in ("running", "waiting")):
                await asyncio.sleep(0.01)


def make_model(folder: Path) -> tuple[Any, dict[str, bytes]]:
    """A random model, and its small files including a tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    vocab = {chr(ord("a") + i): i for i in range(VOCAB)}
    tokenizer: Any = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return AutoModelForCausalLM.from_config(config).eval(), files


REAL = pytest.param("sglang", marks=pytest.mark.sglang)


@pytest.fixture(scope="module", params=[REAL if name == "sglang" else name for name in ENGINES])
def worker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worker]:
    kind, options = ENGINES[request.param]
    if request.param == "sglang":
        options = {**options, "settings": {"python": request.getfixturevalue("sglang_python")}}
    made = Worker(kind, options, tmp_path_factory.mktemp(kind))
    yield made
    made.close()
