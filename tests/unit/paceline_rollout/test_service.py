from __future__ import annotations

import asyncio
import hashlib
import json
import re
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from grpc import aio

from paceline.config import ServiceSettings, parse_job
from paceline.enums import Phase, WorkerKind
from paceline.errors import ConfigError
from paceline.platform.server.chassis import Chassis
from paceline.platform.telemetry.metrics import Metrics
from paceline.platform.transport.rpc import SERVER_OPTIONS, ErrorInterceptor, connect, exchange
from paceline.v1 import experience_pb2, rollout_pb2, roster_pb2, types_pb2
from paceline.v1.experience_pb2_grpc import ExperienceServicer, add_ExperienceServicer_to_server
from paceline.v1.jobs_pb2_grpc import JobsServicer, add_JobsServicer_to_server
from paceline.v1.rollout_pb2_grpc import RolloutStub
from paceline.v1.roster_pb2_grpc import RosterServicer, add_RosterServicer_to_server
from paceline.weights import Staging, WeightServer, pull
from paceline.weights.canary import Canary, CanaryRule
from paceline.weights.model_config import canonical
from paceline_harness.patience import PATIENCE_S
from paceline_rollout.job import build_engine
from paceline_rollout.service import RolloutService
from paceline_rollout.weight_updater import RefusedWeightsError, canary_rule

if TYPE_CHECKING:
    from paceline.v1.rollout_pb2_grpc import RolloutAsyncStub


SPEC: dict[str, Any] = {
    "name": "job",
    "model": {"path": "unused"},
    "tasks": {"environment": "arithmetic"},
    "reward": [{"kind": "exact"}],
    "sampling": {"max_tokens": 8, "max_context": 64},
}


class Ledger(JobsServicer, ExperienceServicer, RosterServicer):
    """The calls of the experience service that a rollout worker makes."""

    def __init__(self, spec: dict[str, Any], files: dict[str, bytes]) -> None:
        self.spec = spec
        self.blobs = {hashlib.sha256(data).hexdigest(): data for data in files.values()}
        self.names = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        self.workers: dict[str, types_pb2.Worker] = {}
        self.joins: list[types_pb2.Worker] = []
        self.phases: list[str] = []  # of heartbeats
        self.left = 0
        self.held: list[roster_pb2.TransferProgress] = []
        self.reports: list[roster_pb2.ReportTransferRequest] = []
        self.deaf = False  # to reports
        self.refusal = roster_pb2.WeightRefusal(version=-1)  # of the last heartbeat
        self.accepted = -1  # a version that another worker serves
        self.fault = ""  # that the trainer finds
        self.answers = asyncio.Event()  # to heartbeats, once it is set
        self.answers.set()
        self.routes: list[roster_pb2.Route] = []
        self.news = asyncio.Event()

    async def GetJob(self, request: Any, context: Any) -> types_pb2.Job:  # pyright: ignore[reportIncompatibleMethodOverride]
        return types_pb2.Job(spec_json=json.dumps(self.spec), artifacts=self.names)

    async def GetArtifact(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: experience_pb2.GetArtifactRequest, context: Any
    ) -> AsyncIterator[experience_pb2.ArtifactChunk]:
        data = self.blobs[request.digest]
        for first in range(0, len(data), 100):
            yield experience_pb2.ArtifactChunk(data=data[first : first + 100])

    async def Join(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: roster_pb2.JoinRequest, context: Any
    ) -> roster_pb2.JoinReply:
        self.workers[request.worker.worker_id] = request.worker
        self.joins.append(request.worker)
        return roster_pb2.JoinReply(lease_s=6)

    async def Heartbeat(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: roster_pb2.HeartbeatRequest, context: Any
    ) -> roster_pb2.HeartbeatReply:
        self.workers[request.worker_id].active_version = request.active_version
        self.workers[request.worker_id].load.update(request.load)
        self.held = list(request.transfers)
        self.phases += [f"{each.name} {each.number}" for each in request.phases]
        await self.answers.wait()
        refuses = request.HasField("refusal")
        self.refusal = request.refusal if refuses else roster_pb2.WeightRefusal(version=-1)
        at_fault = refuses and self.refusal.version == self.accepted
        return roster_pb2.HeartbeatReply(at_fault=at_fault, fault=self.fault)

    async def ReportTransfer(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: roster_pb2.ReportTransferRequest, context: Any
    ) -> roster_pb2.ReportTransferReply:
        if self.deaf:
            await asyncio.sleep(3600)
        self.reports.append(request)
        return roster_pb2.ReportTransferReply()

    async def Leave(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: roster_pb2.LeaveRequest, context: Any
    ) -> roster_pb2.LeaveReply:
        self.workers.pop(request.worker_id, None)
        self.left += 1
        return roster_pb2.LeaveReply()

    async def WatchRoute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: Any, context: Any
    ) -> AsyncIterator[roster_pb2.Route]:
        sent = 0
        while True:
            for route in self.routes[sent:]:
                yield route
            sent = len(self.routes)
            self.news.clear()
            await self.news.wait()

    def announce(self, version: int, endpoint: str, *, key: bytes = b"") -> None:
        policy = types_pb2.PolicyVersion(version=version, step=version)
        source = roster_pb2.ChunkSource(endpoint=endpoint)
        self.routes.append(roster_pb2.Route(version=policy, sources=[source], key=key))
        self.news.set()


class World:
    """A ledger, a trainer's weight server and one rollout worker."""

    def __init__(
        self, ledger: Ledger, trainer: WeightServer, endpoint: str, stub: Any, work: Any
    ) -> None:
        self.ledger = ledger
        self.trainer = trainer
        self.endpoint = endpoint
        self.stub: RolloutAsyncStub = stub
        self.work: asyncio.Task[None] = work  # the worker's

    def publish(self, staging: Staging) -> None:
        self.trainer.offer(staging)
        self.ledger.announce(staging.header.version, self.endpoint, key=staging.key)

    async def until_active(self, version: int) -> types_pb2.Worker:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                worker = self.ledger.workers.get("r0")
                if worker is not None and worker.active_version == version:
                    return worker
                await asyncio.sleep(0.02)

    async def status(self) -> rollout_pb2.RolloutStatus:
        return await self.stub.Status(rollout_pb2.RolloutStatusRequest(), timeout=PATIENCE_S)

    async def until_loaded(self, version: int) -> None:
        while (await self.status()).active.version < version:
            await asyncio.sleep(0.01)

    async def until_more_tokens(self) -> None:
        before = (await self.status()).tokens_generated
        while (await self.status()).tokens_generated <= before:
            await asyncio.sleep(0.01)

    async def until_sampled_with(self, version: int, *, most: int) -> list[int]:
        """The versions of a request's tokens, until this one is among them."""
        found: list[int] = []
        async for event in self.events("long", most=most):
            assert not event.error, event.error
            found += [run.version for run in event.versions]
            if version in found:
                break
        return found

    async def until_refused(self, version: int) -> str:
        async with asyncio.timeout(PATIENCE_S):
            while self.ledger.refusal.version != version:
                await asyncio.sleep(0.02)
        return self.ledger.refusal.reason

    async def until_ended(self) -> RefusedWeightsError:
        await asyncio.wait({self.work}, timeout=PATIENCE_S)
        error: Any = self.work.exception()
        while isinstance(error, ExceptionGroup):
            (error,) = cast(ExceptionGroup[Any], error).exceptions
        assert isinstance(error, RefusedWeightsError)
        return error

    async def generate(self, *names: str, most: int = 4) -> list[rollout_pb2.GenerateEvent]:
        return [event async for event in self.events(*names, most=most)]

    async def events(self, *names: str, most: int) -> AsyncIterator[rollout_pb2.GenerateEvent]:
        sampling = types_pb2.SamplingParams(max_tokens=most, temperature=1, top_p=1)
        batch = rollout_pb2.GenerateBatch(
            requests=[
                rollout_pb2.GenerateRequest(
                    request_id=n,
                    tokens=[1, 2],
                    sampling=sampling,
                    pinned_version=-1,
                    min_version=-1,
                )
                for n in names
            ]
        )

        async def sent() -> AsyncIterator[rollout_pb2.GenerateBatch]:
            yield batch

        replies = exchange(self.stub.Generate, sent(), timeout_s=PATIENCE_S)
        async for message in replies:
            for event in message.events:
                yield event


def new_server() -> tuple[aio.Server, int]:
    server = aio.server(interceptors=[ErrorInterceptor(metrics=Metrics())], options=SERVER_OPTIONS)
    return server, server.add_insecure_port("127.0.0.1:0")


@asynccontextmanager
async def world(
    tmp_path: Path,
    spec: dict[str, Any],
    files: dict[str, bytes],
    *,
    max_refusals: int = 3,
    transport: str = "http",
) -> AsyncGenerator[World]:
    ledger = Ledger({**SPEC, **spec}, files)  # pyright: ignore[reportAbstractUsage]
    central, port = new_server()
    add_JobsServicer_to_server(ledger, central)
    add_ExperienceServicer_to_server(ledger, central)
    add_RosterServicer_to_server(ledger, central)
    await central.start()
    trainer = WeightServer(host="127.0.0.1")
    endpoint = await trainer.start()
    server, own = new_server()
    settings = ServiceSettings(
        kind=WorkerKind.ROLLOUT,
        worker_id="r0",
        experience=f"127.0.0.1:{port}",
        job_id="job",
        run_dir=tmp_path,
        options={"max_refusals": max_refusals, "weights_transport": transport},
    )
    chassis = Chassis(
        settings=settings, server=server, metrics=Metrics(), address=f"127.0.0.1:{own}"
    )
    service = RolloutService(chassis)
    await service.start()
    await server.start()
    work = asyncio.create_task(service.run())
    channel = connect(chassis.address)
    try:
        yield World(ledger, trainer, endpoint, RolloutStub(channel), work)
    finally:
        work.cancel()
        await asyncio.wait({work})
        await service.drain()
        await channel.close()
        await server.stop(0)
        await service.close()
        await trainer.close()
        await central.stop(0)
        assert not ledger.workers


def model_files(model: Any, tmp_path: Path) -> dict[str, bytes]:
    model.config.save_pretrained(tmp_path / "source")
    return {p.name: p.read_bytes() for p in (tmp_path / "source").iterdir()}


async def test_follows_versions_and_relays(tmp_path: Path, model_of: Any, snapshot_of: Any) -> None:
    model = model_of()
    async with world(tmp_path, {}, model_files(model, tmp_path)) as w:
        waiting = asyncio.create_task(w.generate("early"))
        w.publish(snapshot_of(model, version=0))
        worker = await w.until_active(0)
        assert {v.version for e in await waiting for v in e.versions} == {0}
        w.publish(snapshot_of(model_of(seed=1), version=1))
        await w.until_active(1)
        events = await w.generate("a", "b")
        assert {v.version for e in events for v in e.versions} == {1}
        status = await w.stub.Status(rollout_pb2.RolloutStatusRequest(), timeout=PATIENCE_S)
        assert status.active.version == 1
        assert status.canary_error < 1e-4
        assert status.tokens_generated == 12
        source = [worker.weights_endpoint]
        copy = await pull(source, job_id="job", version=1, stage=Staging, timeout_s=PATIENCE_S)
        assert copy.complete
        assert {"cpu_s", "busy_s", "tokens_generated"} <= set(worker.load)


async def test_a_worker_says_what_it_is_at_from_the_start_of_its_engine(
    tmp_path: Path, model_of: Any, snapshot_of: Any
) -> None:
    async with world(tmp_path, {"rollout": {"engine": {"kind": "simulated"}}}, {}) as w:
        first, last = w.ledger.joins[0], w.ledger.joins[-1]
        assert [each.name for each in first.phases] == [Phase.STARTING_ENGINE]
        assert not first.weights_endpoint  # it gets no route
        assert [each.name for each in last.phases] == [Phase.WAITING_FOR_WEIGHTS]
        assert last.weights_endpoint
        w.publish(snapshot_of(model_of(), version=5))
        async with asyncio.timeout(PATIENCE_S):
            while f"{Phase.SERVING} 5" not in w.ledger.phases:
                await asyncio.sleep(0.02)


def sealed(staging: Staging, key: bytes) -> Staging:
    """The same snapshot under a key, in many chunks."""
    made = Staging(replace(staging.header, chunk_bytes=256), key=key)
    made.fill(0, bytes(staging.buffer()))
    made.finish()
    return made


async def test_sealed_weights_are_followed_reported_and_shown(
    tmp_path: Path, model_of: Any, snapshot_of: Any
) -> None:
    engine = {"kind": "simulated", "vocab_size": 37, "decode_tokens_per_s": 500}
    key = bytes(range(32))
    async with world(tmp_path, {"rollout": {"engine": engine}}, {}) as w:
        snapshot = sealed(snapshot_of(model_of(), version=0), key)
        w.publish(snapshot)
        await w.until_active(0)
        async with asyncio.timeout(PATIENCE_S):
            done = roster_pb2.TRANSFER_EVENT_DONE
            while not w.ledger.held or done not in {each.event for each in w.ledger.reports}:
                await asyncio.sleep(0.02)
    report = w.ledger.reports[-1]
    assert (report.job_id, report.worker_id, report.event) == ("job", "r0", done)
    assert report.endpoint == w.endpoint
    assert sum(each.num_bytes for each in w.ledger.reports) == snapshot.header.num_bytes
    (held,) = w.ledger.held
    assert held.num_ready == held.num_chunks == snapshot.header.num_chunks


async def test_a_tracker_that_hears_no_reports_holds_nothing_up(
    tmp_path: Path, model_of: Any, snapshot_of: Any
) -> None:
    engine = {"kind": "simulated", "vocab_size": 37, "decode_tokens_per_s": 500}
    async with world(tmp_path, {"rollout": {"engine": engine}}, {}) as w:
        w.ledger.deaf = True
        for version in range(3):
            w.publish(snapshot_of(model_of(), version=version))
            await w.until_active(version)


def tokens_of(events: list[rollout_pb2.GenerateEvent]) -> list[int]:
    return [token for event in events for token in event.tokens]


def with_a_wrong_canary(staging: Staging) -> Staging:
    (sequence,) = staging.header.canary.sequences
    wrong = Canary((replace(sequence, logprobs=(-9.0, -9.0)),), noise=0.02)
    made = Staging(replace(staging.header, canary=wrong))
    made.fill(0, bytes(staging.buffer()))
    made.finish()
    return made


async def test_a_wrong_canary_keeps_work_away_until_a_newer_version_is_right(
    tmp_path: Path, model_of: Any, snapshot_of: Any
) -> None:
    """The worker stays in the roster to hear of it; what it holds is not received again."""
    model = model_of()
    files = model_files(model, tmp_path)
    async with world(tmp_path, {}, files, max_refusals=1_000_000) as w:
        w.publish(snapshot_of(model, version=0))
        await w.until_active(0)
        w.publish(with_a_wrong_canary(snapshot_of(model, version=1)))
        worker = await w.until_active(-1)
        assert not w.ledger.left
        assert worker.weights_endpoint
        w.publish(snapshot_of(model, version=2))
        await w.until_active(2)
        done = roster_pb2.TRANSFER_EVENT_DONE
        assert sum(each.event == done for each in w.ledger.reports if each.version == 1) <= 1


async def test_a_worker_refuses_for_good_what_it_gets_wrong_in_all_loads(
    tmp_path: Path, model_of: Any, snapshot_of: Any
) -> None:
    """It stays, as all other workers may say the same, and goes on with the version before."""
    model = model_of()
    async with world(tmp_path, {}, model_files(model, tmp_path)) as w:
        w.publish(snapshot_of(model, version=0))
        await w.until_active(0)
        w.ledger.accepted = 0
        w.publish(with_a_wrong_canary(snapshot_of(model, version=1)))
        reason = await w.until_refused(1)
        assert re.fullmatch(r"canary: trim \d\.\d+, noise 0\.02, ratio \d+, allowed 2", reason)
        await w.until_active(0)
        assert await w.until_refused(1) == reason
        assert f"{Phase.REFUSING_WEIGHTS} 1" in w.ledger.phases
        again = await w.generate("again")
        assert {run.version for event in again for run in event.versions} == {0}
        w.publish(snapshot_of(model, version=2))
        await w.until_active(2)
        await w.until_refused(-1)  # nothing
        assert not w.work.done()


async def test_a_worker_goes_back_again_and_again_to_the_last_version_that_it_has_right(
    tmp_path: Path, model_of: Any, snapshot_of: Any
) -> None:
    """It holds two snapshots all the while: that version, and the one that it receives."""
    model = model_of()
    async with world(tmp_path, {}, model_files(model, tmp_path)) as w:
        w.publish(snapshot_of(model, version=4))
        await w.until_active(4)
        before = await w.generate("one")
        for version in (5, 6, 7):
            w.publish(with_a_wrong_canary(snapshot_of(model_of(seed=version), version=version)))
            await w.until_refused(version)
            await w.until_active(4)
            assert [each.version for each in w.ledger.held] == [4, version]
        assert tokens_of(await w.generate("one")) == tokens_of(before)


async def test_a_worker_without_a_right_version_waits_and_says_so(
    tmp_path: Path, model_of: Any, snapshot_of: Any
) -> None:
    model = model_of()
    async with world(tmp_path, {}, model_files(model, tmp_path)) as w:
        w.publish(with_a_wrong_canary(snapshot_of(model, version=1)))
        await w.until_refused(1)
        while f"{Phase.REFUSING_WEIGHTS} 1" not in w.ledger.phases:
            await asyncio.sleep(0.01)
        assert w.ledger.workers["r0"].active_version == -1


async def test_a_worker_ends_that_refuses_what_another_one_serves(
    tmp_path: Path, model_of: Any, snapshot_of: Any
) -> None:
    model = model_of()
    async with world(tmp_path, {}, model_files(model, tmp_path)) as w:
        w.publish(with_a_wrong_canary(snapshot_of(model, version=1)))
        await w.until_refused(1)
        w.ledger.accepted = 1
        error = await w.until_ended()
    assert re.fullmatch(
        r"version 1, which another worker serves, was refused in 3 loads of the same bytes: "
        r"canary: trim \d\.\d+, noise 0\.02, ratio \d+, allowed 2",
        error.message,
    )


async def test_a_worker_ends_whose_tokens_the_trainer_finds_wrong(
    tmp_path: Path, model_of: Any, snapshot_of: Any
) -> None:
    model = model_of()
    async with world(tmp_path, {}, model_files(model, tmp_path)) as w:
        w.publish(snapshot_of(model, version=1))
        await w.until_active(1)
        w.ledger.fault = "mismatch_kl is 0.7"
        error = await w.until_ended()
    assert error.message == "mismatch_kl is 0.7"


async def test_a_worker_ends_at_once_with_weights_of_another_model(
    tmp_path: Path, model_of: Any, snapshot_of: Any
) -> None:
    async with world(tmp_path, {}, model_files(model_of(), tmp_path)) as w:
        w.publish(snapshot_of(model_of("qwen3"), version=0))
        error = await w.until_ended()
    assert "version 0 (step 0) cannot be loaded: snapshot: tensor " in error.message
    assert "q_norm.weight' is unknown to this model (and " in error.message


async def test_a_worker_ends_at_once_whose_model_is_configured_otherwise(
    tmp_path: Path, model_of: Any, snapshot_of: Any
) -> None:
    """Its canary is fine: short text hardly shows the base of RoPE, or ids that end a turn."""
    model = model_of()
    files = model_files(model, tmp_path)
    content = json.loads(files["config.json"]) | {"eos_token_id": 9, "use_cache": False}
    (tmp_path / "config.json").write_text(json.dumps(content))
    staging = snapshot_of(model, version=0)
    made = Staging(replace(staging.header, config_json=canonical(tmp_path / "config.json")))
    made.fill(0, bytes(staging.buffer()))
    made.finish()
    async with world(tmp_path, {}, files) as w:
        w.publish(made)
        error = await w.until_ended()
    assert error.message == (
        "version 0 (step 0) cannot be loaded: config.json: eos_token_id is 2 here and 9 in the "
        "trainer"
    )


async def test_a_worker_that_holds_other_bytes_refuses_them_and_names_the_tensor(
    tmp_path: Path, model_of: Any, snapshot_of: Any
) -> None:
    """At the first load, although log-probs are right."""
    model = model_of()
    spec = {"rollout": {"engine": {"kind": "inexact", "fault": "one weight"}}}
    async with world(tmp_path, spec, model_files(model, tmp_path), max_refusals=2) as w:
        w.publish(snapshot_of(model, version=0))
        reason = await w.until_refused(0)
    assert re.search(r"allowed 2; unequal tensors: model\.layers\.\S+$", reason)


async def test_a_version_that_was_damaged_in_memory_is_fetched_again_before_it_is_refused(
    tmp_path: Path, model_of: Any, snapshot_of: Any
) -> None:
    model = model_of()
    spec = {"rollout": {"engine": {"kind": "inexact", "fault": "one weight"}}}
    files = model_files(model, tmp_path)
    async with world(tmp_path, spec, files, max_refusals=2, transport="forgetful") as w:
        w.publish(snapshot_of(model, version=0))
        await w.until_refused(0)
        done = [each for each in w.ledger.reports if each.event == roster_pb2.TRANSFER_EVENT_DONE]
        assert len(done) == 2


def test_the_rule_is_the_jobs_and_the_old_tolerance_has_no_effect() -> None:
    for rollout, rule in (
        ({}, CanaryRule(2.0, 2e-4)),
        ({"canary_tolerance": 0.05}, CanaryRule(2.0, 2e-4)),
        ({"canary": {"ratio": 3.0, "floor": 0.0}}, CanaryRule(3.0, 0.0)),
    ):
        assert canary_rule(parse_job({**SPEC, "rollout": rollout})) == rule


async def test_a_simulated_engine_follows_too(
    tmp_path: Path, model_of: Any, snapshot_of: Any
) -> None:
    engine = {"kind": "simulated", "vocab_size": 37, "decode_tokens_per_s": 500}
    async with world(tmp_path, {"rollout": {"engine": engine}}, {}) as w:
        w.publish(snapshot_of(model_of(), version=0))
        await w.until_active(0)
        events = await w.generate("a")
        assert sum(len(e.tokens) for e in events) == 4


async def test_versions_that_are_accepted_during_one_heartbeat_all_keep_their_tokens(
    tmp_path: Path, model_of: Any, snapshot_of: Any
) -> None:
    engine = {"kind": "simulated", "vocab_size": 37, "decode_tokens_per_s": 500}
    spec = {
        "rollout": {"engine": {**engine, "length": {"mean": 1e6}}},
        "sampling": {"max_tokens": 900_000, "max_context": 1_000_000},
    }
    async with world(tmp_path, spec, {}) as w, asyncio.timeout(PATIENCE_S):
        w.publish(snapshot_of(model_of(), version=0))
        await w.until_active(0)
        generated = asyncio.create_task(w.until_sampled_with(4, most=900_000))
        for version in (1, 2, 3, 4):
            await w.until_more_tokens()
            w.ledger.answers.clear()
            w.publish(snapshot_of(model_of(), version=version))
            await w.until_loaded(version)
        w.ledger.answers.set()
        assert set(await generated) >= {1, 2, 3, 4}


async def test_a_terminated_process_hands_back_all_that_it_sampled(
    tmp_path: Path, model_of: Any, snapshot_of: Any
) -> None:
    """Its engine emits nothing by itself for a minute; the drain does."""
    engine = {"kind": "simulated", "vocab_size": 37, "decode_tokens_per_s": 2, "flush_s": 60}
    spec = {**SPEC, "rollout": {"engine": {**engine, "length": {"mean": 1000}}}}
    ledger = Ledger(spec, {})  # pyright: ignore[reportAbstractUsage]
    central, port = new_server()
    for add in (
        add_JobsServicer_to_server,
        add_ExperienceServicer_to_server,
        add_RosterServicer_to_server,
    ):
        add(ledger, central)
    await central.start()
    trainer = WeightServer(host="127.0.0.1")
    world = World(ledger, trainer, await trainer.start(), None, None)
    settings = {"kind": "rollout", "worker_id": "r0", "job_id": "job", "run_dir": str(tmp_path)}
    settings |= {"experience": f"127.0.0.1:{port}", "insecure": True}
    path = tmp_path / "settings.yaml"
    path.write_text(json.dumps(settings))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "paceline_rollout", str(path)
    )
    try:
        world.publish(snapshot_of(model_of(), version=0))
        worker = await world.until_active(0)
        channel = connect(worker.endpoint)
        world.stub = RolloutStub(channel)
        reading = asyncio.create_task(world.generate("a", "b", most=60))
        load = ledger.workers["r0"].load
        async with asyncio.timeout(PATIENCE_S):
            while load["request_s"] < 2 * 3.0:  # both have been open for more than five tokens
                await asyncio.sleep(0.02)
        assert (load["open"], load["callers"], load["max_running"]) == (2, 1, 512)
        process.send_signal(signal.SIGTERM)
        events = await asyncio.wait_for(reading, PATIENCE_S)
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
        await channel.close()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await trainer.close()
        await central.stop(0)
    assert [e.error_code for e in events] == ["UNAVAILABLE"] * 2
    assert all(len(e.tokens) > 4 for e in events)
    assert not ledger.workers


def test_an_unknown_engine_option_names_the_known_ones(tmp_path: Path) -> None:
    spec = parse_job({**SPEC, "rollout": {"engine": {"kind": "simulated", "speed": 3}}})
    with pytest.raises(ConfigError, match=r"rollout.engine.speed: unknown .*decode_tokens_per_s"):
        build_engine(spec, folder=tmp_path, job_id="job")


async def test_a_worker_without_a_job_is_refused() -> None:
    settings = ServiceSettings(kind=WorkerKind.ROLLOUT, worker_id="r0")
    chassis = Chassis(settings=settings, server=aio.server(), metrics=Metrics(), address="x:1")
    with pytest.raises(ConfigError, match="job_id"):
        RolloutService(chassis)
