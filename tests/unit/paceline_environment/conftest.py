from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from grpc import aio
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from paceline.config import ServiceSettings
from paceline.config.tokenizers import TokenizerSettings
from paceline.enums import Purpose, WorkerKind
from paceline.platform.digest import number
from paceline.platform.server.chassis import Chassis
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.transport.rpc import SERVER_OPTIONS
from paceline.types import Assignment, Task, Worker
from paceline_environment.service import EnvironmentService, build
from paceline_harness.patience import PATIENCE_S
from paceline_harness.peers import FakeExperience, FakePeer, FakeReward, FakeRollout

EOS = 1
WAIT_S = PATIENCE_S
IN_PROCESS = TokenizerSettings(run_in="in_process")
VOCAB = ["<pad>", "</s>", "<|user|>", "<|assistant|>", *"0123456789abcdefghq+=- "]
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer_files(*, chat: bool) -> dict[str, bytes]:
    fast = FastTokenizer(models.WordLevel({t: i for i, t in enumerate(VOCAB)}, unk_token=" "))
    fast.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    fast.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    fast.add_special_tokens(VOCAB[:4])
    config = {"eos_token": "</s>", **({"chat_template": CHAT} if chat else {})}
    return {
        "tokenizer.json": fast.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


def speak(seed: int, position: int) -> int:
    """A token that depends only on seed and position; one in six ends the turn."""
    drawn = number(seed, position)
    return EOS if drawn % 6 == 0 else 4 + drawn % 10


@dataclass
class Stage:
    """An environment worker whose peers are fakes."""

    experience: FakeExperience
    rollouts: list[FakeRollout]
    rewards: list[FakeReward]
    settings: ServiceSettings
    service: EnvironmentService | None = None
    running: asyncio.Task[None] | None = None
    servers: list[aio.Server] = field(default_factory=list[aio.Server])
    metrics: Metrics = field(default_factory=Metrics)

    def announce(self, *, rollouts: int | None = None, rewards: int | None = None) -> None:
        """Put peers on the roster."""
        workers: list[Worker] = []
        for i, peer in enumerate(self.rollouts[:rollouts]):
            workers.append(self._worker(peer, f"rollout-{i}", WorkerKind.ROLLOUT, peer.version))
        for i, peer in enumerate(self.rewards[:rewards]):
            workers.append(self._worker(peer, f"reward-{i}", WorkerKind.REWARD, -1))
        self.experience.workers = workers

    async def open(self, *, rollouts: int | None = None) -> EnvironmentService:
        """Start the worker under test and wait until it has discovered its peers."""
        self.announce(rollouts=rollouts)
        server = aio.server(options=SERVER_OPTIONS)
        port = server.add_insecure_port("127.0.0.1:0")
        chassis = Chassis(self.settings, server, self.metrics, f"127.0.0.1:{port}")
        self.service = await build(chassis)
        await server.start()
        self.servers.append(server)
        self.running = asyncio.create_task(self.service.run())
        async with asyncio.timeout(WAIT_S):
            while self._known(self.service) < len(self.experience.workers):
                await asyncio.sleep(0.01)
        return self.service

    def resume(self) -> None:
        """Let all rollout workers generate without a pause."""
        for rollout in self.rollouts:
            rollout.single = False
            rollout.frozen.set()

    async def close(self) -> None:
        if self.service is not None and self.running is not None:
            self.running.cancel()
            await asyncio.wait({self.running})
            await self.service.close()
        for server in self.servers:
            await server.stop(None)
        for peer in [*self.rollouts, *self.rewards, self.experience]:
            await peer.stop()

    @staticmethod
    def _known(service: EnvironmentService) -> int:
        watches = service._rollouts, service._rewards  # pyright: ignore[reportPrivateUsage]
        return sum(len(workers.all()) for workers in watches)

    @staticmethod
    def _worker(peer: FakePeer, name: str, kind: WorkerKind, version: int) -> Worker:
        job = "job" if kind is WorkerKind.ROLLOUT else ""
        return Worker(name, kind, peer.address, job_id=job, active_version=version, load=peer.load)


Staged = Callable[..., Awaitable[Stage]]


@pytest.fixture
def chat_files() -> dict[str, bytes]:
    """The small files of a model with a chat template."""
    return tokenizer_files(chat=True)


@pytest.fixture
async def staged() -> AsyncIterator[Staged]:
    """Makes a stage whose peers serve and whose worker is not started yet."""
    made: list[Stage] = []

    async def make(
        *,
        spec: dict[str, Any] | None = None,
        chat: bool = False,
        rollouts: int = 1,
        rewards: int = 1,
        pause_s: float = 0.0,
        tokenizers: TokenizerSettings = IN_PROCESS,
        **options: Any,
    ) -> Stage:
        document = {
            "name": "test",
            "model": {"path": "unused"},
            "tasks": {"environment": "arithmetic"},
            "sampling": {"max_tokens": 8, "max_context": 64, "on_truncation": "score"},
            "reward": [{"kind": "exact"}],
            **(spec or {}),
        }
        experience = FakeExperience(  # pyright: ignore[reportAbstractUsage]
            spec=json.dumps(document), files=tokenizer_files(chat=chat)
        )
        await experience.start()
        settings = ServiceSettings(
            kind=WorkerKind.ENVIRONMENT,
            worker_id="env-0",
            experience=experience.address,
            options=options,
            insecure=True,
            tokenizers=tokenizers,
        )
        speakers = [FakeRollout(speak=speak, pause_s=pause_s) for _ in range(rollouts)]
        stage = Stage(experience, speakers, [FakeReward() for _ in range(rewards)], settings)
        for peer in [*stage.rollouts, *stage.rewards]:
            await peer.start()
        made.append(stage)
        return stage

    yield make
    for stage in made:
        await stage.close()


@pytest.fixture
def until() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """Waits until a condition holds."""

    async def wait(holds: Callable[[], object], timeout_s: float = WAIT_S) -> None:
        async with asyncio.timeout(timeout_s):
            while not holds():
                await asyncio.sleep(0.01)

    return wait


@pytest.fixture
def assign() -> Callable[..., Assignment]:
    """A group of episodes of one arithmetic task."""

    def make(name: str = "g0", size: int = 4, **changes: Any) -> Assignment:
        payload = json.dumps({"question": "12+34=", "answer": "46"})
        given: dict[str, Any] = {
            "job_id": "job",
            "group_id": name,
            "indices": tuple(range(size)),
            "attempts": (1,) * size,
            "task": Task("task", "arithmetic", payload),
            "purpose": Purpose.TRAIN,
            "lease_s": 10.0,
            "seed": 7,
            **changes,
        }
        return Assignment(**given)

    return make
